"""Request: one sequence the engine computes, and EngineRequest: the immutable order it came from.

Owner: the engine core makes a Request from an EngineRequest; from then on only the scheduler and the core change it.
A prompt with n > 1 is one parent Request, which computes the prompt but its last token, and n children that share its
blocks and sample. A beam is such a child, and in turn the parent of those that continue it.
Not here: KV blocks (kv_cache_manager.py), text (output_processor.py), policies (scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from octavo.engine.executor import ExecutorInfo
from octavo.engine.scheduler_output import NewRequest, TokenKind
from octavo.outputs import FinishReason, PositionLogprobs, RequestMetrics
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams

#: A request waits for another one to compute the beginning that both share at most so long, in all its life.
MOST_FOLLOWING_STEPS = 64


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    #: Freed by a preemption and queued again; it will recompute what it had.
    PREEMPTED = "preempted"
    #: A parent that has computed all its tokens; it keeps the blocks until every child has been admitted.
    HOLDING = "holding"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"
    #: A parent after its children took over; it never had an answer of its own.
    FINISHED_PARENT = "parent"

    @property
    def finished(self) -> bool:
        return self in _FINISHED

    @staticmethod
    def of(reason: FinishReason) -> RequestStatus:
        return RequestStatus(reason)


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Everything the engine core needs of one prompt. Built and checked by InputProcessor."""

    request_id: str
    prompt_token_ids: list[int]
    #: Resolved: no field is None that `SamplingParams.resolve` fills.
    sampling_params: SamplingParams
    #: Tokens each choice may generate, already lowered to what context and KV pool leave room for.
    max_tokens: int
    #: Unsigned, 64 bits.
    seed: int
    #: Ids that end the sequence as the model's own end; empty with ignore_eos.
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prompt: str | None = None
    #: time.perf_counter of the process that took the request in.
    arrival: float = 0.0
    #: Smaller is more urgent; equal ones are served in order of arrival.
    priority: int = 0
    #: Prefix blocks are shared only between requests of equal salt and adapter.
    cache_salt: str | None = None
    #: Whose it is, for the policy `fair`: the server puts a name of the API key here.
    tenant: str | None = None
    adapter: str | None = None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """All ids that end the sequence: the model's (unless ignored) and the request's own."""
        return self.eos_token_ids | frozenset(self.sampling_params.stop_token_ids)


def max_output_tokens(info: ExecutorInfo, num_prompt_tokens: int) -> int:
    """How many tokens can follow a prompt, at least 0.

    Prompt and answer fit max_model_len; all of it but the last token, whose KV is never needed, fits the pool.
    """
    pool_tokens = min(group.max_tokens for group in info.kv_groups)
    return max(0, min(info.max_model_len, pool_tokens + 1) - num_prompt_tokens)


class Request:
    """One sequence: its tokens, how many of them have KV (`num_computed_tokens`), and where it stands.

    Invariant: num_computed_tokens <= num_target_tokens <= num_tokens. Whatever is missing, a fresh prompt, a chunk of
    it, one decode step or everything after a preemption, is simply the difference.
    """

    def __init__(
        self, origin: EngineRequest, arrival_index: int, *, parent: Request | None = None, choice: int = 0, added: float = 0.0
    ) -> None:
        """`added`: when it came to the engine core, by the core's clock; choices and beams have their parent's."""
        params = origin.sampling_params
        self.origin = origin
        self.parent = parent
        self.choice = choice
        #: Parents, and requests that only want prompt logprobs: nothing is sampled from them.
        several = params.num_choices > 1 or params.beam_width is not None
        self.prefill_only = parent is None and (several or origin.max_tokens == 0)
        self.request_id = origin.request_id if parent is None else f"{origin.request_id}#{choice}"
        #: By arrival; a parent comes before its children. No two requests have the same.
        self.order = (arrival_index, choice if parent is not None else -1)
        self.arrival_index = arrival_index
        self.token_ids = list(origin.prompt_token_ids)
        self.num_prompt_tokens = len(origin.prompt_token_ids)
        self.num_computed_tokens = 0
        #: Most tokens that had KV before a preemption: computing them is recomputing.
        self.num_lost_tokens = 0
        #: Prompt tokens found in the prefix cache when first admitted.
        self.num_cached_tokens = 0
        self.status = RequestStatus.WAITING
        self.children: list[Request] = []
        #: Children not admitted yet; at 0 a holding parent lets go of its blocks.
        self.num_children_to_admit = 0
        self.was_admitted = False
        #: The worker holds state under this id, which it must be told to drop.
        self.known_to_worker = False
        #: Blocks of each group's table that the worker knows.
        self.num_blocks_sent: tuple[int, ...] = ()
        #: Last step that computed something for it (for the first in the queue: the last one in which the queue got on).
        self.last_step = 0
        #: Step from which nobody queued later goes before it, and how many more it may be overtaken when queued again.
        self.due_step: int | None = None
        self.patience: int | None = None
        #: Steps it may still wait for another request to compute the beginning that both share.
        self.follow_steps_left = MOST_FOLLOWING_STEPS
        #: Since its last admission: steps [first, end) in which it waited so. For the record of steps.
        self.followed: list[tuple[int, int]] = []
        self.prompt_logprobs: list[PositionLogprobs | None] | None = [None] if self._wants_prompt_logprobs else None
        self.prompt_logprobs_sent = False
        self.metrics = RequestMetrics(arrival=origin.arrival)
        self.added: float = added if parent is None else parent.added
        self._worker_params: SamplingParams = _worker_params(origin) if parent is None else parent._worker_params

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return self.parent is None and self.origin.sampling_params.prompt_logprobs is not None

    @property
    def is_fork(self) -> bool:
        """A choice that has not been admitted yet: it starts on the blocks of its parent, if that still holds them."""
        return self.parent is not None and not self.was_admitted

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_target_tokens(self) -> int:
        """Tokens that must have KV before the next token can be drawn (or, without sampling, before it is done)."""
        return self.num_prompt_tokens - 1 if self.prefill_only else len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        return self.num_target_tokens - self.num_computed_tokens

    @property
    def next_kind(self) -> TokenKind:
        return TokenKind.PROMPT if self.num_computed_tokens < self.num_prompt_tokens else TokenKind.GENERATED

    @property
    def bypasses_prefix_cache(self) -> bool:
        """Prompt logprobs need the hidden states of every prompt token, so its prompt is always computed."""
        return self._wants_prompt_logprobs

    def next_chunk(self) -> int:
        """Missing tokens up to the boundary between prompt and generated ones, which an entry never crosses."""
        if self.next_kind is TokenKind.PROMPT:
            return min(self.num_target_tokens, self.num_prompt_tokens) - self.num_computed_tokens
        return self.num_missing_tokens

    def add_prompt_logprobs(self, start: int, found: list[PositionLogprobs]) -> None:
        """Take the logprobs of tokens start+1 .. of a chunk; a chunk computed again replaces what it gave before."""
        if self.prompt_logprobs is not None and not self.prompt_logprobs_sent:
            del self.prompt_logprobs[start + 1 :]
            self.prompt_logprobs.extend(found)

    def take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """The logprobs the first time they are complete, None otherwise: a stream carries them once."""
        if self.prompt_logprobs is None or self.prompt_logprobs_sent or len(self.prompt_logprobs) < self.num_prompt_tokens:
            return None
        self.prompt_logprobs_sent = True
        return self.prompt_logprobs

    def make_children(self) -> list[Request]:
        """The choices of a parent, in order; or the first beam."""
        params = self.origin.sampling_params
        count = params.num_choices if params.beam_width is None else 1
        children = [Request(self.origin, self.arrival_index, parent=self, choice=i) for i in range(count)]
        for child in children:
            child.num_cached_tokens = self.num_cached_tokens
            child.metrics = replace(self.metrics)
        self.children, self.num_children_to_admit = children, len(children)
        return self.children

    def for_worker(self) -> NewRequest:
        """What a worker must know to start it, or to start it again."""
        params = self._worker_params
        if params.prompt_logprobs is not None and (not self._wants_prompt_logprobs or self.prompt_logprobs_sent):
            params = replace(params, prompt_logprobs=None)  # delivered already, or by the parent
        return NewRequest(
            request_id=self.request_id,
            prompt_token_ids=self.origin.prompt_token_ids,
            output_token_ids=self.token_ids[self.num_prompt_tokens :],
            sampling_params=params,
            seed=self.origin.seed,
            choice=self.choice,
            stop_token_ids=self.origin.stop_token_ids,
            bad_words_ids=self.origin.bad_words_ids,
            adapter=self.origin.adapter,
        )

    def continued(self, token_id: int, choice: int) -> Request:
        """A beam that goes on from this one with `token_id`."""
        child = Request(self.origin, self.arrival_index, parent=self, choice=choice)
        child.token_ids = [*self.token_ids, token_id]
        child.num_cached_tokens = self.num_cached_tokens
        child.metrics = replace(self.metrics, num_preemptions=0)
        return child


def _worker_params(origin: EngineRequest) -> SamplingParams:
    """The order's, with the logprobs that the engine itself needs for ranking.

    The best w continuations that go on are among the w + s most probable ones of each beam, s being the ids that end it; twice w
    are asked for at least, since a stop string may end some.
    """
    params = origin.sampling_params
    if params.beam_width is not None:
        width = params.beam_width
        needed = min(MAX_LOGPROBS, width + max(width, len(origin.stop_token_ids)))
    elif params.num_choices > params.n:
        needed = 0
    else:
        return params
    return replace(params, logprobs=max(needed, params.logprobs or 0))
