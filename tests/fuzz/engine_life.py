"""The life of an engine: operations in any order, each followed by a full account of blocks and requests.

`Life` has one method per operation; each returns whether there was something to do. What the operations are, and in which
order, its caller says: a hypothesis state machine (tests/engine/test_engine_fuzz.py) or a random walk (fuzz_engine.py).
The model is the one made of hashes (tests/engine/fake.py), with KV that also depends on adapter and cache_salt, so that any
block shared, written or kept wrongly changes a token or fails at once. Every finished answer is compared with the one of its
own run by definition: token ids, text, reason and logprobs.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal

from octavo.engine.engine_core import EngineCore
from octavo.engine.metrics import EngineStats
from octavo.engine.request import EngineRequest, Request, max_output_tokens
from octavo.engine.scheduler_output import NewRequest, SchedulerOutput, StepResult
from octavo.errors import InvalidRequestError
from octavo.outputs import CompletionDelta, CompletionOutput
from tests.engine.beam_oracle import plain_search
from tests.engine.fake import Collector, FakeExecutor, FakeTokenizer, logprob, make_core, prompt_logprob, reference_run, request

MAX_MODEL_LEN = 40
When = Literal["before", "after"]


class LifeExecutor(FakeExecutor):
    """KV depends on whose cache a request may use; an interrupt can come in the middle of a step."""

    def __init__(self, orders: dict[str, EngineRequest], **options: Any) -> None:
        super().__init__(max_model_len=MAX_MODEL_LEN, **options)
        self.orders = orders
        self.interrupt: When | None = None

    def identity(self, new: NewRequest) -> str:
        return identity(self.orders[new.request_id.partition("#")[0]])

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._interrupted("before")
        result = super().execute(output)
        self.outputs.clear()
        self._interrupted("after")
        return result

    def _interrupted(self, when: When) -> None:
        if self.interrupt == when:
            self.interrupt = None
            raise KeyboardInterrupt


def identity(order: EngineRequest) -> str:
    return f"{order.adapter}/{order.cache_salt}"


class Life:
    def __init__(self, *, num_blocks: int, block_size: int, groups: int = 1, window: int | None = None, **settings: Any) -> None:
        """`window`: a further group has such a sliding window, and as many blocks."""
        self.orders: dict[str, EngineRequest] = {}
        self.kinds = not settings.get("reuse_generated", False)
        windows = () if window is None else ((window, num_blocks),)
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "groups": groups}
        self.executor = LifeExecutor(self.orders, **sizes, windows=windows, kinds=self.kinds)
        self.core: EngineCore = make_core(self.executor, **settings)
        #: Tokens of the longest prompt that can run.
        self.longest = min(num_blocks * block_size, MAX_MODEL_LEN - 1)
        self.collector = Collector()
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.num_beams = 0
        #: What beam searches must find, by request.
        self._searched: dict[str, list[tuple[list[int], float]]] = {}
        #: Operations that did something, by name.
        self.counts: Counter[str] = Counter()

    # Operations

    def add(self, prompt: list[int], **wanted: Any) -> bool:
        """Queue a request (fields as tests.engine.fake.request has them), or see it refused where the queue is full."""
        order = request(f"r{len(self.orders)}", prompt[: self.longest], seed=len(self.orders), **wanted)
        self.orders[order.request_id] = order
        if self.core.has_room(order):
            self.collector.expect(order)
            self.core.add_request(order)
            return self._done("add")
        try:
            self.core.add_request(order)
        except InvalidRequestError as error:
            assert error.code == "queue_full"
        else:
            raise AssertionError("taken although there is no room")
        del self.orders[order.request_id]
        return self._done("refuse")

    def step(self) -> bool:
        if not self.core.has_unfinished_requests():
            return False
        self._take(self.core.step())
        return self._done("step")

    def abort(self, number: int) -> bool:
        """The `number`th of those unfinished."""
        name = self._pick(self._unfinished(), number)
        return name is not None and self._abort(name) and self._done("abort")

    def abort_in_flight(self, number: int) -> bool:
        """Between the schedule and the result of a step."""
        name = self._pick(self._unfinished(), number)
        if name is None:
            return False
        self.executor.before_step = lambda output: self._abort(name) and None
        self._take(self.core.step())
        self.executor.before_step = lambda output: None
        return self._done("abort in flight")

    def preempt(self, number: int) -> bool:
        """A running request or a holding parent loses its blocks, as if memory had run out."""
        scheduler = self.core.scheduler
        victim = self._pick([*scheduler.running(), *scheduler.holding.values()], number)
        if victim is None:
            return False
        scheduler._preempt(victim)
        return self._done("preempt")

    def reset(self) -> bool:
        self.core.reset_prefix_cache()
        return self._done("reset")

    def fail(self, number: int) -> bool:
        """One running sequence has a fault of its own in the next step, if that computes it."""
        victim: Request | None = self._pick(list(self.core.scheduler.running()), number)
        if victim is None:
            return False
        self.failed.add(victim.origin.request_id)
        self.executor.errors = {victim.request_id: "broken"}
        self._take(self.core.step())
        self.executor.errors = {}
        return self._done("fail")

    def interrupt(self, where: Literal["before", "after", "update"]) -> bool:
        """Ctrl-C before or after the model has computed, or while the result is counted: everything is aborted."""
        if not list(self.core.scheduler.running()):
            return False
        scheduler = self.core.scheduler
        if where == "update":
            scheduler.complete_step = _interrupt  # type: ignore[method-assign]
        else:
            self.executor.interrupt = where
        unfinished = self._unfinished()
        try:
            self._take(self.core.step())
        except KeyboardInterrupt:
            self.aborted.update(unfinished)
        else:  # a step without entries never reaches the executor
            assert where != "update"
            self.executor.interrupt = None
        return self._done("interrupt")

    def end(self, most_steps: int = 20_000) -> None:
        """Step until nothing is left; then no request is lost, and every block free exactly once."""
        for _ in range(most_steps):
            if not self.step():
                break
        else:
            raise AssertionError("the engine does not come to an end")
        self._check_nothing_left()
        for name, output in self.collector.outputs.items():
            reasons = {choice.finish_reason for choice in output.outputs}
            assert None not in reasons, f"{name} has been lost"
            assert (name in self.aborted) == ("abort" in reasons), f"{name}: {reasons}"
            assert name in self.failed or "error" not in reasons, f"{name}: {reasons}"

    @property
    def operations(self) -> int:
        return self.counts.total()

    def totals(self) -> Counter[str]:
        """Counters of the engine, to see what the operations have brought about."""
        stats = self.core.stats
        counters = {field.name: getattr(stats, field.name) for field in fields(EngineStats) if field.type == "int"}
        return Counter(counters | {"beams": self.num_beams})

    # Checks

    def _done(self, name: str) -> bool:
        self.counts[name] += 1
        self.core.check_invariants()
        return True

    def _abort(self, name: str) -> bool:
        deltas = self.core.abort([name])
        if any(delta.finish_reason == "abort" for delta in deltas):
            self.aborted.add(name)
        self._take(deltas)
        return True

    def _unfinished(self) -> list[str]:
        return list(self.core._requests)

    @staticmethod
    def _pick(candidates: list[Any], number: int) -> Any:
        return candidates[number % len(candidates)] if candidates else None

    def _take(self, deltas: Iterable[CompletionDelta]) -> None:
        deltas = list(deltas)
        self.collector.add(deltas)
        self.collector.deltas.clear()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._check_answer(delta.request_id, delta.index)

    def _check_answer(self, name: str, index: int) -> None:
        order, output = self.orders[name], self.collector.accumulators[name].output
        choice = output.outputs[index]
        if order.sampling_params.beam_width is not None:
            self._check_beam(order, index, choice)
            return
        token_ids, values = reference_run(order, index, self.executor.info, identity(order), self.kinds)
        expected = with_stops(order, token_ids, self.core.tokenizer)
        last = values[len(order.prompt_token_ids) - 1 :]
        if choice.finish_reason in ("stop", "length"):
            assert (choice.token_ids, choice.text, choice.finish_reason) == expected, f"{name}#{index}"
        else:
            assert choice.token_ids == expected[0][: len(choice.token_ids)], f"{name}#{index}"
        if order.sampling_params.logprobs is not None:
            found = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs or [], strict=True)]
            assert found == [logprob(value).logprob for value in last[: len(found)]], f"{name}#{index}"
        if output.prompt_logprobs is not None:
            prompt = order.prompt_token_ids
            found = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True) if entry]
            assert found == [prompt_logprob(values[i], token).logprob for i, token in enumerate(prompt[1:])], name
        elif order.sampling_params.prompt_logprobs is not None:
            assert choice.finish_reason in ("abort", "error"), f"{name} lacks its prompt logprobs"

    def _check_beam(self, order: EngineRequest, index: int, choice: CompletionOutput) -> None:
        if choice.finish_reason not in ("stop", "length"):
            return  # the best it had so far
        most = min(order.max_tokens, max_output_tokens(self.executor.info, len(order.prompt_token_ids)))
        if (found := self._searched.get(order.request_id)) is None:
            found = self._searched[order.request_id] = plain_search(order, most, identity(order), self.kinds)
        expected = with_stops(order, found[index][0], self.core.tokenizer)
        assert (choice.token_ids, choice.text, choice.finish_reason) == expected, f"{order.request_id}: beam {index}"
        self.num_beams += 1

    def _check_nothing_left(self) -> None:
        core, scheduler, stats = self.core, self.core.scheduler, self.core.stats
        assert not core._requests and not core.outputs._choices
        assert (
            not scheduler.num_waiting
            and not scheduler.counts.num_tokens
            and not scheduler.counts.num_requests
            and not scheduler.num_running
            and not scheduler.holding
        )
        assert stats.requests_added == stats.requests_finished == len(self.collector.accumulators)
        assert not core.kv._holdings and not core.kv._copies and not core.kv._copies_in_flight
        assert self.executor.known.keys() <= set(scheduler.worker.dropped), "the worker keeps what it is never told to drop"
        for pool in core.kv.pools:
            assert pool.ref_counts == [0] * pool.num_blocks
            assert pool.num_free == pool.num_blocks >= pool.num_cached
            assert sorted(pool.take() for _ in range(pool.num_blocks)) == list(range(pool.num_blocks)), "a block is lost, or free twice"
            assert pool.num_free == pool.num_cached == 0


def _interrupt(failed: object) -> Any:
    raise KeyboardInterrupt


def with_stops(order: EngineRequest, token_ids: list[int], tokenizer: FakeTokenizer) -> tuple[list[int], str, str]:
    """Ids, text and finish reason of an answer: the stop strings applied to the whole text."""
    data, before, params = b"", "", order.sampling_params
    for count, token in enumerate(token_ids, start=1):
        if token in order.stop_token_ids and count > params.min_tokens:
            return token_ids[:count], _decoded(data), "stop"
        data += b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        text = _decoded(data)
        found = [stop for stop in params.stop if text.endswith(stop) and count >= params.min_tokens and len(text) > len(before)]
        if found:
            return token_ids[:count], text[: -max(map(len, found))], "stop"
        before = text
    return token_ids, before, "length"


def _decoded(data: bytes) -> str:
    """UTF-8 with U+FFFD for what is broken in the middle; an incomplete character at the end is dropped."""
    return codecs.utf_8_decode(data, "replace", False)[0]
