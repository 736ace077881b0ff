"""Counter-based random numbers: a draw is a pure function of (seed, choice, position), so there is no state to keep.

Method: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), checked
against the known-answer vectors of their Random123 library. Nothing depends on the batch, the order of requests, or on
what was drawn before, so a preempted request continues with exactly the numbers it would have had.
Not here: any generator with hidden state, and how a number becomes a token (sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
#: Multipliers of words 0 and 2, and what is added to each key word between rounds (Salmon et al., table 2).
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUND_NUMBERS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]

#: Word 3 of the counter says what a number is for, so that later uses (acceptance tests of speculation) never share
#: numbers with the draw of the token.
PURPOSE_DRAW = 0


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of R counters at once.

    counter: uint64 [4, R] and key: uint64 [2, R], each entry a 32-bit word. Returns uint64 [4, R] of 32-bit words.
    """
    keys = (key + _ROUND_NUMBERS * _WEYL) & _MASK  # [rounds, 2, R]
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2 are multiplied, 1 and 3 are mixed in
    for round_key in keys:
        product = even * _MULTIPLIERS
        even, odd = (product >> _SHIFT)[::-1] ^ odd ^ round_key, (product & _MASK)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int = PURPOSE_DRAW
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each of R rows: float64 [R], a multiple of 2**-53.

    seeds: any integers, used modulo 2**64 (so -1 and 2**64 - 1 are one seed); choices in [0, 2**32); positions (tokens
    the sequence holds so far) in [0, 2**64). The seed is the key, the counter is (position low, position high, choice,
    purpose); the first two words of the result give the 53 bits, high bits first.
    """
    seed, position = _words(seeds), _words(positions)
    choice = np.array(choices, dtype=np.uint64)
    counter = np.stack([position & _MASK, position >> _SHIFT, choice, np.full_like(choice, purpose)])
    word = philox4x32(counter, np.stack([seed & _MASK, seed >> _SHIFT]))
    bits = (word[0] >> np.uint64(5) << np.uint64(26)) | (word[1] >> np.uint64(6))
    return np.asarray(bits * 2.0**-53, dtype=np.float64)


def _words(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], dtype=np.uint64)
