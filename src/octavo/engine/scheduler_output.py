"""The contract between the scheduler and the workers: plain data, one SchedulerOutput a step, one StepResult back.

Owner: the scheduler builds a SchedulerOutput and never changes it afterwards; a worker keeps what it needs of it in its
own state (worker/input_batch.py), because later steps name a request by its id alone.
Not here: policies, block accounting, anything with a device or an array library.

The batch a step describes is flat: the tokens of all entries end to end, in the order of `entries`. All entries of kind
GENERATED come before all of kind PROMPT (the arithmetic follows the kind: docs/numerics.md), and one entry never
crosses from prompt into generated tokens; a resumed request that needs both gets them in two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from octavo.outputs import PositionLogprobs
from octavo.sampling_params import SamplingParams


class TokenKind(IntEnum):
    """What a token was when it entered the sequence; decides the arithmetic of its row and is part of the block key."""

    PROMPT = 0
    GENERATED = 1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: those with the same sliding window, or with none."""

    num_blocks: int
    block_size: int
    #: None: attention sees every earlier token; w: the last w tokens, itself included.
    sliding_window: int | None = None

    def blocks_in_window(self, num_tokens: int) -> int:
        """Most blocks that one sequence holds while `num_tokens` of it are computed in a step."""
        assert self.sliding_window is not None
        return -(-(self.sliding_window - 1 + num_tokens) // self.block_size) + 1

    def first_block_seen(self, num_computed: int) -> int:
        """The first block that a row at position `num_computed` or later sees."""
        return 0 if self.sliding_window is None else max(0, num_computed - self.sliding_window + 1) // self.block_size

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that an empty pool has room for; 2**62 where a window moves over any length."""
        if self.sliding_window is not None and self.num_blocks >= self.blocks_in_window(1):
            return 2**62
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine must know of the model and the pool; fixed for the executor's life."""

    kv_groups: tuple[KVGroup, ...]
    vocab_size: int
    #: The model's limit, already lowered to the configured max_model_len.
    max_model_len: int
    #: Bytes of one block over all layers of each group; for messages and metrics.
    block_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """All a worker must know of a request it starts, or starts again after a preemption (then it replaces the old)."""

    request_id: str
    prompt_token_ids: list[int]
    #: Tokens generated before a preemption; empty otherwise.
    output_token_ids: list[int]
    #: Resolved: no field is None that `SamplingParams.resolve` fills.
    sampling_params: SamplingParams
    #: Random numbers are keyed by (seed, choice, position).
    seed: int
    choice: int
    #: Ids that end the sequence, masked until min_tokens is reached; empty with ignore_eos.
    stop_token_ids: frozenset[int] = frozenset()
    #: bad_words as token sequences.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None


class ScheduledEntry(NamedTuple):
    """Tokens [start, start + num_tokens) of one request, all of one kind, to be computed in this step.

    A tuple, since hundreds are made in a step: a frozen dataclass takes three times as long to make.
    """

    request_id: str
    start: int
    num_tokens: int
    kind: TokenKind
    #: Blocks appended to the request's table before this step, one tuple per KV group. For a request in
    #: `new_requests` this is its whole table. A table is never shortened: blocks behind a sliding window may have been given
    #: away, or be -1 from the beginning; no later row sees them.
    new_block_ids: tuple[tuple[int, ...], ...]
    #: True when the last of these tokens is the last one known: its logits give the next token.
    sample: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block inside a KV group. All copies run before anything in the step writes."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    step: int
    entries: list[ScheduledEntry]
    new_requests: list[NewRequest] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    #: Requests the worker must forget before it reads `new_requests` (finished, aborted or preempted).
    dropped_request_ids: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(slots=True)
class SampledToken:
    token_id: int
    #: Chosen token first; None when the request asked for no logprobs.
    logprobs: PositionLogprobs | None = None


@dataclass(slots=True)
class StepResult:
    """What a worker returns for one SchedulerOutput."""

    #: One for every entry with `sample`, keyed by request id, unless it is in `errors`.
    sampled: dict[str, SampledToken] = field(default_factory=dict)
    #: For entries of requests with prompt_logprobs: the logprobs of tokens start+1 .. start+num_tokens (as far as
    #: those are prompt tokens), in order.
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    #: A fault of one request (non-finite logits): it ends with this text, its neighbours go on.
    errors: dict[str, str] = field(default_factory=dict)
    #: The forward pass was a recorded one, replayed by one native call.
    replayed: bool = False
    #: Seconds by part of the step (prepare, forward, sample), for events and `bench latency --breakdown`.
    timings: dict[str, float] = field(default_factory=dict)
