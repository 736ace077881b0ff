"""A random life of the engine: any order of adding, aborting, stepping and resetting, with pools of a few blocks.

After every step all blocks are accounted for; every finished answer equals the one computed from its definition.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.fake import Collector, check_against_reference, finish, make_core, reference_tokens, request


class EngineLife(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        tokens=st.integers(10, 60),
        budget=st.sampled_from([1, 2, 3, 7, 64]),
        seqs=st.integers(1, 8),
        prefills=st.integers(1, 4),
        decodes=st.integers(1, 8),
        stalled=st.integers(1, 8),
        groups=st.integers(1, 2),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "priority", "shortest-prefill", "longest-prefix", "fair"]),
        patience=st.sampled_from([1, 10, 1000]),
    )
    def build(self, block_size, tokens, budget, seqs, prefills, decodes, stalled, groups, caching, policy, patience):
        self.core = make_core(
            num_blocks=-(-tokens // block_size),
            block_size=block_size,
            max_model_len=40,
            groups=groups,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_prefill_batch_size=prefills,
            max_decode_batch_size=decodes,
            max_stalled_steps=stalled,
            enable_prefix_caching=caching,
            policy=policy,
            promote_after_steps=patience,
        )
        self.longest = min(-(-tokens // block_size) * block_size, 39)
        self.collector = Collector()
        self.orders, self.aborted = {}, set()

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 16),
        own=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 3, 4]),
        most=st.integers(1, 14),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        logprobs=st.sampled_from([None, None, 0]),
        salt=st.sampled_from([None, None, "salt"]),
        min_tokens=st.sampled_from([0, 0, 1]),
        stop=st.sampled_from([(), (), ("ab",), ("e",)]),
    )
    def add(self, family, length, own, n, most, temperature, priority, logprobs, salt, min_tokens, stop):
        name = f"r{len(self.orders)}"
        # Long common beginnings, then a few tokens of its own.
        prompt = [5 + (family * 11 + i * i) % 25 for i in range(length)] + [5 + (len(self.orders) * 7 + i) % 25 for i in range(own)]
        order = request(
            name,
            prompt[: self.longest],
            seed=len(self.orders),
            n=n,
            max_tokens=most,
            temperature=temperature,
            priority=priority,
            prompt_logprobs=logprobs,
            cache_salt=salt,
            tenant=f"t{length % 3}",
            min_tokens=min(min_tokens, most),
            stop=stop,
        )
        self.orders[name] = order
        self.collector.expect(order)
        self.core.add_request(order)

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        name = f"r{number}"
        deltas = self.core.abort([name])
        if deltas:
            self.aborted.add(name)
        self.collector.add(deltas)

    @rule(number=st.integers(0, 30))
    def abort_in_flight(self, number):
        """Between the schedule and the result of a step."""
        self.core.executor.before_step = lambda output: self.abort(number)
        self.collector.add(self.core.step())
        self.core.executor.before_step = lambda output: None

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.collector.add(self.core.step())
            self.core.check_invariants()

    @rule()
    def reset_cache(self):
        self.core.reset_prefix_cache()

    @invariant()
    def accounts_are_right(self):
        if hasattr(self, "core"):
            self.core.check_invariants()
            self.check_finished()

    def check_finished(self):
        for name, output in self.collector.outputs.items():
            for choice in output.outputs:
                expected = self.expected(name, choice.index)
                if choice.finish_reason in ("stop", "length"):
                    assert (choice.token_ids, choice.text) == expected
                else:
                    assert choice.finish_reason in (None, "abort")
                    assert choice.token_ids == expected[0][: len(choice.token_ids)]

    def expected(self, name, index):
        """Ids and text of a choice by definition, the stop strings applied to the whole text."""
        order = self.orders[name]
        if not hasattr(self, "known"):
            self.known = {}
        if (name, index) not in self.known:
            self.known[name, index] = _with_stops(order, reference_tokens(order, index, self.core.executor.info), self.core.tokenizer)
        return self.known[name, index]

    def teardown(self):
        if not hasattr(self, "core"):
            return
        finish(self.core, self.collector)
        self.check_finished()
        for name, output in self.collector.outputs.items():
            assert output.finished and (name in self.aborted) == any(c.finish_reason == "abort" for c in output.outputs)
        assert not self.core.executor.known or len(self.core.executor.known) <= len(self.core.scheduler._dropped)


def _with_stops(order, token_ids, tokenizer):
    data, stops = b"", order.sampling_params.stop
    for count, token in enumerate(token_ids, start=1):
        if token in order.stop_token_ids and count > order.sampling_params.min_tokens:
            break
        data += b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        text = data.decode("utf-8", "ignore") if not data.endswith((b"\xf0\x9f", b"\x98\x80")) else None
        for stop in stops:
            if text is not None and text.endswith(stop) and count >= order.sampling_params.min_tokens:
                return token_ids[:count], _decoded(data)[: -len(stop)]
    return token_ids, _decoded(data)


def _decoded(data: bytes) -> str:
    """UTF-8 with U+FFFD for what is broken in the middle; an incomplete character at the end is dropped."""
    import codecs

    return codecs.utf_8_decode(data, "replace", False)[0]


EngineLife.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestEngineLife = EngineLife.TestCase


def test_a_thousand_aborts_leave_nothing():  # E09, A10
    rng = random.Random(3)
    core = make_core(num_blocks=20, block_size=2, max_num_batched_tokens=5)
    collector = Collector()
    for number in range(1000):
        order = request(f"r{number}", [5 + rng.randrange(3) for _ in range(rng.randint(1, 25))], n=rng.choice([1, 1, 3]), max_tokens=5)
        collector.expect(order)
        core.add_request(order)
        for _ in range(rng.randint(0, 4)):
            collector.add(core.step())
        collector.add(core.abort([order.request_id]))
        assert core.stats.blocks_used == 0 and not core.has_unfinished_requests()
    core.check_invariants()
    order = request("last", [5, 6, 7], max_tokens=3, eos=False)
    collector.expect(order)
    core.add_request(order)
    finish(core, collector)
    check_against_reference({"last": collector.outputs["last"]}, [order], core.executor.info)
