"""SamplingState: what the sampler must know of one request, worked out once when the request starts.

Owner: the worker's record of the request; it calls `append` after each draw. Every array here belongs to this one
request and nothing is shared between rows, so no setting can leak into a neighbour.
Not here: arithmetic on logits (processors.py), drawing (sampler.py), stop strings and the end of a request (engine).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidRequestError
from octavo.sampling.processors import Filters
from octavo.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_NO_IDS: IntArray = np.empty(0, dtype=np.int64)
_NO_IDS.setflags(write=False)
_RESOLVED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class TokenCounts:
    """Distinct tokens of a sequence and how often each was generated, as growing arrays: a few KB, not one cell for
    each token of the vocabulary."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> IntArray:
        """int64 [D], distinct ids in the order of first appearance."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> FloatArray:
        """float32 [D], times generated; 0 for a token that only the prompt holds."""
        return self._counts[: len(self._slots)]

    def add(self, token_id: int, count: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == self._ids.size:
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += count


class BadWords:
    """Finds the tokens that would complete a forbidden sequence: one dictionary look-up for each length of sequence.

    Sequences are matched over prompt and output, like the n-gram bans of other engines: a word the prompt has begun
    may not be completed.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]], vocab_size: int) -> None:
        last_ids: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            if sequence and 0 <= sequence[-1] < vocab_size:  # another id can never be drawn: nothing to forbid
                last_ids.setdefault(sequence[:-1], []).append(sequence[-1])
        self._last_ids = {prefix: np.array(sorted(set(ids)), dtype=np.int64) for prefix, ids in last_ids.items()}
        self._lengths = sorted({len(prefix) for prefix in self._last_ids})
        self.longest_prefix = self._lengths[-1] if self._lengths else 0

    def __bool__(self) -> bool:
        return bool(self._last_ids)

    def banned(self, tail: list[int]) -> list[IntArray]:
        """Arrays of ids that may not follow `tail`, the sequence's last tokens (at least `longest_prefix` if it has them)."""
        found = []
        for length in self._lengths:
            if length <= len(tail):
                ids = self._last_ids.get(tuple(tail[len(tail) - length :]))
                if ids is not None:
                    found.append(ids)
        return found


class SamplingState:
    """Settings and history of one choice of one request.

    params: resolved (`SamplingParams.resolve`). seed, choice: the key of its random numbers. output_token_ids: what was
    generated before a preemption, else empty. stop_token_ids: ids masked until min_tokens are generated.
    bad_words_ids: forbidden sequences of tokens. vocab_size: width of the logits.
    Raises InvalidRequestError when allowed_token_ids or logit_bias name a token outside the vocabulary, ValueError for
    params that are not resolved.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        choice: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: frozenset[int],
        bad_words_ids: tuple[tuple[int, ...], ...],
        vocab_size: int,
    ) -> None:
        unresolved = [name for name in _RESOLVED if getattr(params, name) is None]
        if unresolved:
            raise ValueError(f"call SamplingParams.resolve first: {', '.join(unresolved)} is None")
        self.params = params
        self.seed = seed
        self.choice = choice
        self.vocab_size = vocab_size
        self.greedy = params.greedy
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self.filters = Filters.of(params, vocab_size)
        self.repetition_penalty = float(params.repetition_penalty or 1.0)

        self.allowed_ids = self._allowed()
        self.bias_ids, self.bias_values = self._bias()
        self._stop_ids = np.array(sorted(i for i in stop_token_ids if 0 <= i < vocab_size), dtype=np.int64)
        self._bad_words = BadWords(bad_words_ids, vocab_size)
        self._tail = list(prompt_token_ids[-self._bad_words.longest_prefix :]) if self._bad_words.longest_prefix else []
        self.counts: TokenCounts | None = None
        if self.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self.counts = TokenCounts()
            if self.repetition_penalty != 1.0:  # the only penalty that sees the prompt
                for token_id in dict.fromkeys(prompt_token_ids):
                    self.counts.add(token_id, 0)
        for token_id in output_token_ids:
            self.append(token_id)

    @property
    def position(self) -> int:
        """Tokens of the sequence so far: the position of the token to be drawn."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def edits_logits(self) -> bool:
        """False when the next draw can read the model's logits as they are: nothing biased, penalised or banned."""
        return bool(
            self.allowed_ids is not None
            or self.bias_ids.size
            or (self.counts is not None and self.counts.ids.size)
            or self._bad_words
            or (self._stop_ids.size and self.num_output_tokens < self.params.min_tokens)
        )

    def append(self, token_id: int) -> None:
        """Record the token just drawn."""
        self.num_output_tokens += 1
        if self.counts is not None:
            self.counts.add(token_id, 1)
        if self._bad_words.longest_prefix:
            self._tail.append(token_id)
            del self._tail[: -self._bad_words.longest_prefix]

    def banned_ids(self) -> IntArray:
        """int64 [B]: tokens forbidden at this position by min_tokens and bad_words; may repeat."""
        banned = self._bad_words.banned(self._tail) if self._bad_words else []
        if self._stop_ids.size and self.num_output_tokens < self.params.min_tokens:
            banned.append(self._stop_ids)
        if not banned:
            return _NO_IDS
        return banned[0] if len(banned) == 1 else np.concatenate(banned)

    def _allowed(self) -> IntArray | None:
        """Ascending, each once."""
        allowed = self.params.allowed_token_ids
        if allowed is None:
            return None
        self._check_ids("allowed_token_ids", allowed)
        return np.unique(np.array(allowed, dtype=np.int64))

    def _bias(self) -> tuple[IntArray, FloatArray]:
        bias = self.params.logit_bias or {}
        self._check_ids("logit_bias", bias)
        return np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(f"{name}: token id {token_id} is outside the model's vocabulary of {self.vocab_size}", param=name)
