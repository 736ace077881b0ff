"""The matrix: each row is a way of running the same prompts, which must not change an answer.

A row says when it does not apply, runs, and gives back counters that prove its feature fired; `required` are those that
must not be 0. A new feature is one small class and one line in `matrix`. Rows are stateless.
Not here: comparing (comparison.py), the order of things (run.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from octavo.engine.engine_core import EngineCore
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams
from octavo.verify.beams import Beams
from octavo.verify.session import EngineRun, Session, Work

Counters = dict[str, int | float]
#: Requests in a batch at least: fewer prompts run several times over.
BATCH = 4
FORK_CHOICES = 4
FORK_CASES = 2


class Row(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def required(self) -> tuple[str, ...]:
        """Counters that must be above 0, else the row proves nothing and fails."""
        ...

    @property
    def hits_allowed(self) -> bool:
        """Whether the beginning of a prompt may come from the cache, and so never be computed."""
        ...

    def not_applicable(self, session: Session) -> str | None: ...
    def run(self, session: Session, watch: Any) -> Counters: ...


class _Always:
    required: ClassVar[tuple[str, ...]] = ()
    hits_allowed: ClassVar[bool] = False

    def not_applicable(self, session: Session) -> str | None:
        return None


def batch_of(session: Session) -> Work:
    """Every case, and copies of them where they are few."""
    copies = -(-BATCH // len(session.cases))
    return [(case, copy) for copy in range(copies) for case in session.cases]


class KVCache(_Always):
    name = "kv cache"
    about = "one prompt at a time, each token from the KV of those before it"
    required = ("decode steps",)

    def run(self, session: Session, watch: Any) -> Counters:
        with EngineRun(session, watch) as engine:
            for case in session.cases:
                engine.run([(case, 0)])
            return {"decode steps": engine.core.stats.generated_tokens_computed, "largest batch": engine.largest_batch}


@dataclass(frozen=True)
class Chunks(_Always):
    """size None: all of a prompt at once."""

    size: int | None
    required: ClassVar[tuple[str, ...]] = ("chunks of that size",)

    @property
    def name(self) -> str:
        return f"chunks of {self.size or 'all'}"

    @property
    def about(self) -> str:
        return "prompts computed whole" if self.size is None else f"prompts computed {self.size} token{'s' * (self.size > 1)} at a time"

    def not_applicable(self, session: Session) -> str | None:
        longest = max(case.num_prompt_tokens for case in session.cases)
        if self.size is not None and longest <= self.size:
            return f"the longest prompt has {longest} tokens, so it is one chunk"
        return None

    def run(self, session: Session, watch: Any) -> Counters:
        longest = max(case.num_prompt_tokens for case in session.cases)
        with EngineRun(session, watch, max_num_batched_tokens=self.size or max(longest, 16)) as engine:
            for case in session.cases:
                engine.run([(case, 0)])
            sizes = engine.chunk_sizes()
        return {"chunks of that size": sizes.get(self.size or longest, 0), "largest chunk": max(sizes), "chunks": sum(sizes.values())}


class Batched(_Always):
    name = "batched"
    about = "all prompts in every step together"
    required = ("steps with several requests",)

    def run(self, session: Session, watch: Any) -> Counters:
        with EngineRun(session, watch) as engine:
            engine.run(batch_of(session))
            return _batch_counters(engine)


class Shuffled(_Always):
    name = "shuffled"
    about = "the same batch in another order, arriving while others run"
    required = ("steps with several requests", "requests out of order")

    def run(self, session: Session, watch: Any) -> Counters:
        work, order = batch_of(session), shuffled(session)
        with EngineRun(session, watch, max_num_seqs=max(2, len(work) - 1), max_prefill_batch_size=1) as engine:
            engine.run(order)
            moved = sum(a != b for a, b in zip(work, order, strict=True))
            return {**_batch_counters(engine), "requests out of order": moved}


def shuffled(session: Session) -> Work:
    work = list(batch_of(session))
    return [*work[1::2][::-1], *work[0::2]]


def _batch_counters(engine: EngineRun) -> Counters:
    several = sum(count for size, count in engine.core.stats.batch_sizes.items() if size > 1)
    return {"steps with several requests": several, "largest batch": engine.largest_batch}


class PrefixHit(_Always):
    name = "prefix hit"
    about = "every prompt again, its beginning found in the cache"
    required = ("prompt tokens found",)
    hits_allowed = True

    def not_applicable(self, session: Session) -> str | None:
        longest = max(case.num_prompt_tokens for case in session.cases)
        return (
            None if longest >= session.block_size else f"no prompt fills a block of {session.block_size} tokens (the longest has {longest})"
        )

    def run(self, session: Session, watch: Any) -> Counters:
        with EngineRun(session, watch, enable_prefix_caching=True) as engine:
            for case in session.cases:
                engine.run([(case, 0)], params={"max_tokens": 1})
            before = engine.core.stats.prefix_hit_tokens
            engine.run([(case, 1) for case in session.cases])
            stats = engine.core.stats
            found = {"prompt tokens found": stats.prefix_hit_tokens - before, "blocks shared": stats.blocks_shared}
            return {**found, "blocks copied": stats.blocks_copied}


class _Pusher:
    """Called after each step: whenever a choice has drawn its third token, an urgent request for the whole pool comes in and
    pushes out whatever runs."""

    def __init__(self, engine: EngineRun, token: int, most: int = 1_000_000) -> None:
        """most: how often at most."""
        self.engine, self.token, self.most = engine, token, most
        self.drawn: dict[tuple[str, int], int] = {}
        self.numbers = itertools.count()

    def __call__(self, core: EngineCore, deltas: list[CompletionDelta]) -> None:
        push = False
        for delta in deltas:
            choice = (delta.request_id, delta.index)
            self.drawn[choice] = self.drawn.get(choice, 0) + len(delta.token_ids)
            push = push or (self.drawn[choice] == 3 and delta.finish_reason is None and delta.request_id in self.engine.watch.names)
        if push and self.most > 0:
            self.most -= 1
            info = self.engine.parts.executor.info
            group = info.kv_groups[0]
            prompt = [self.token] * min(group.num_blocks * group.block_size, info.max_model_len - 1)
            params = SamplingParams(temperature=0, max_tokens=1)
            core.add_request(self.engine.inputs.process(f"urgent-{next(self.numbers)}", prompt, params, priority=-1))


class Preemption(_Always):
    name = "preemption"
    about = "a pool for little more than one request, and urgent ones that push the others out"
    required = ("preemptions", "tokens computed again")

    def run(self, session: Session, watch: Any) -> Counters:
        work = batch_of(session)
        with EngineRun(session, watch, num_blocks=session.blocks_for(session.longest) + 1) as engine:
            engine.run(work, after_step=_Pusher(engine, session.cases[0].token_ids[0]))
            stats, own = engine.core.stats, sum((case.params.max_tokens or 1) - 1 for case, _ in work)
            blocks = engine.core.kv.num_blocks
        return {"preemptions": stats.preemptions, "tokens computed again": stats.generated_tokens_computed - own, "blocks": blocks}


class Fork(_Always):
    name = "fork n=4"
    about = "four choices of a prompt share its blocks and part from there"
    required = ("forks", "blocks copied")

    def not_applicable(self, session: Session) -> str | None:
        if not fork_cases(session):
            return "no prompt is sampled with a temperature"
        if all((case.num_prompt_tokens - 1) % session.block_size == 0 for case in fork_cases(session)):
            return "no prompt ends inside a block, so nothing is shared that a choice writes to"
        return None

    def run(self, session: Session, watch: Any) -> Counters:
        work = [(case, 0) for case in fork_cases(session)]
        with EngineRun(session, watch) as engine:
            engine.run(work, n=FORK_CHOICES)
            stats = engine.core.stats
            return {"forks": stats.forks, "blocks shared": stats.blocks_shared, "blocks copied": stats.blocks_copied}


def fork_cases(session: Session) -> list[Any]:
    """The shortest of those whose choices differ: each choice is recomputed in full for the baseline."""
    return sorted((case for case in session.cases if case.draws), key=lambda case: case.num_prompt_tokens)[:FORK_CASES]


class Together(_Always):
    name = "together"
    about = "chunks of 16, a small pool, urgent requests, prefix hits and choices, all at once"
    required = ("preemptions", "steps with several requests")
    hits_allowed = True

    def run(self, session: Session, watch: Any) -> Counters:
        blocks = session.blocks_for(session.longest) + 2
        forking = fork_cases(session)
        with EngineRun(session, watch, num_blocks=blocks, enable_prefix_caching=True, max_num_batched_tokens=16) as engine:
            pusher = _Pusher(engine, session.cases[0].token_ids[0], most=3)
            engine.run(batch_of(session), after_step=pusher)
            if forking:
                engine.run([(case, 100) for case in forking], n=FORK_CHOICES, after_step=pusher)
            stats = engine.core.stats
            found = {"preemptions": stats.preemptions, "prompt tokens found": stats.prefix_hit_tokens, "forks": stats.forks}
            return {**found, **_batch_counters(engine)}


@dataclass(frozen=True)
class Threads(_Always):
    count: int
    required: ClassVar[tuple[str, ...]] = ("steps",)

    @property
    def name(self) -> str:
        return f"threads {self.count}"

    @property
    def about(self) -> str:
        return f"computed by {self.count} thread{'s' * (self.count > 1)}"

    def not_applicable(self, session: Session) -> str | None:
        if session.backend != "cpu":
            return f"the {session.backend} backend has no threads of ours"
        facts = session.executor.ops.describe()
        if facts["available_threads"] == 1:
            return "this process may use one core only"
        return None

    def run(self, session: Session, watch: Any) -> Counters:
        with session.other(threads=self.count) as parts, EngineRun(session, watch, parts=parts) as engine:
            engine.run(batch_of(session))
            used: Any = parts.executor
            right = used.ops.describe()["threads"] == self.count
            return {"threads": used.ops.describe()["threads"], "steps": engine.core.stats.steps if right else 0}


class Replayed(_Always):
    name = "replayed"
    about = "steps replayed from a recorded program (the baseline runs eagerly)"
    required = ("steps replayed",)

    def not_applicable(self, session: Session) -> str | None:
        if not session.config.replay:
            return "the setting replay is off"
        return None if session.backend == "cpu" else f"the {session.backend} backend runs every step eagerly"

    def run(self, session: Session, watch: Any) -> Counters:
        # arriving one after the other and ending one after the other: steps of every number of rows
        with EngineRun(session, watch, max_prefill_batch_size=1) as engine:
            engine.run(shuffled(session))
            stats = engine.core.stats
            return {"steps replayed": stats.steps_replayed, "steps": stats.steps}


def matrix(session: Session) -> list[Row]:
    """The rows in the order in which they run: cheap and basic ones first."""
    from octavo.verify.reference import Reference
    from octavo.verify.streams import Streamed

    rows: list[Row] = [KVCache(), *(Chunks(size) for size in (1, 7, 64, None)), Batched(), Shuffled()]
    rows += [PrefixHit(), Preemption(), Fork(), Beams(), Together()]
    rows += [Threads(count) for count in thread_counts(session)]
    return [*rows, Replayed(), Streamed(), Reference()]


def thread_counts(session: Session) -> list[int]:
    """1, 2, 4, ... and as many as there are; without the number everything else runs with, unless that is all there is."""
    facts = session.executor.ops.describe()
    most, usual = int(facts.get("available_threads", 1)), int(facts.get("threads", 1))
    counts = sorted({*(1 << i for i in range(most.bit_length()) if 1 << i <= most), most} - {usual})
    return counts or [1]
