"""Random numbers: the published vectors, the key, and that nothing but the key matters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.random import philox4x32, uniforms

# (counter, key, result) from the known-answer file of Random123 (Salmon et al.), philox4x32 with 10 rounds.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

SEEDS = st.integers(-(2**63), 2**64 - 1)
ROWS = st.lists(st.tuples(SEEDS, st.integers(0, 2**32 - 1), st.integers(0, 2**40)), min_size=1, max_size=9)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same method with Python integers, one counter at a time, written from the paper's figure."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def scalar_uniform(seed: int, choice: int, position: int, purpose: int = 0) -> float:
    seed %= 2**64
    words = scalar_philox([position % 2**32, position >> 32, choice, purpose], [seed % 2**32, seed >> 32])
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert words[:, 0].tolist() == result
    assert scalar_philox(counter, key) == result


def test_known_answers_side_by_side():
    columns = [np.array([case[i] for case in KNOWN], dtype=np.uint64).T for i in range(3)]
    assert (philox4x32(columns[0], columns[1]) == columns[2]).all()


@given(ROWS)
@settings(max_examples=60, deadline=None)
def test_uniforms_equal_the_scalar_definition_in_any_batch(rows):
    seeds, choices, positions = zip(*rows, strict=True)
    got = uniforms(seeds, choices, positions)
    assert got.dtype == np.float64 and got.shape == (len(rows),)
    assert got.tolist() == [scalar_uniform(*row) for row in rows]
    assert ((got >= 0) & (got < 1)).all()


def test_each_part_of_the_key_matters():
    base = (1, 0, 0)
    keys = [base, (2, 0, 0), (1 + 2**32, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 2**32)]
    values = {float(uniforms([s], [c], [p])[0]) for s, c, p in keys}
    values.add(float(uniforms([1], [0], [0], purpose=1)[0]))
    assert len(values) == len(keys) + 1


def test_seeds_are_taken_modulo_two_to_the_64():
    assert uniforms([-1], [0], [0]) == uniforms([2**64 - 1], [0], [0])
    assert uniforms([-(2**63)], [3], [9]) == uniforms([2**63], [3], [9])


def test_uniforms_fill_the_interval_evenly():
    count, cells = 40_000, 100
    values = uniforms([7] * count, [0] * count, range(count))
    observed = np.bincount((values * cells).astype(int), minlength=cells)
    chi_square = ((observed - count / cells) ** 2 / (count / cells)).sum()
    assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001
    pairs = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(pairs) < 4 / np.sqrt(count)


def test_no_rows():
    assert uniforms([], [], []).shape == (0,)
