"""A random life of the engine: any order of its operations, with pools of a few blocks; and faults planted to see that they are found.

After every operation all blocks are accounted for; every finished answer equals the one computed from its definition.
"""

from __future__ import annotations

import dataclasses
import logging
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.prefix_cache import PrefixCache
from octavo.engine.scheduler import Scheduler
from octavo.engine.worker_view import WorkerView
from tests.engine.fake import Collector, check_against_reference, finish, make_core, request
from tests.fuzz.engine_life import Life
from tests.fuzz.fuzz_engine import MUST_HAPPEN, OPERATIONS, FuzzFailure, fuzz, live, plan


class EngineLife(RuleBasedStateMachine):
    life: Life | None = None

    @initialize(
        block_size=st.integers(1, 4),
        tokens=st.integers(1, 60),
        budget=st.sampled_from([1, 2, 3, 7, 64]),
        seqs=st.integers(1, 8),
        prefills=st.integers(1, 4),
        decodes=st.integers(1, 8),
        stalled=st.integers(1, 8),
        groups=st.integers(1, 2),
        caching=st.booleans(),
        reuse=st.sampled_from([False, False, True]),
        policy=st.sampled_from(["fcfs", "priority", "priority", "shortest-prefill", "longest-prefix", "fair"]),
        patience=st.sampled_from([1, 10, 1000]),
        queue=st.sampled_from([1, 4, 1000]),
    )
    def build(self, block_size, tokens, budget, seqs, prefills, decodes, stalled, groups, caching, reuse, policy, patience, queue):
        self.life = Life(
            num_blocks=-(-tokens // block_size),
            block_size=block_size,
            groups=groups,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_prefill_batch_size=prefills,
            max_decode_batch_size=decodes,
            max_stalled_steps=stalled,
            max_waiting_requests=queue,
            enable_prefix_caching=caching,
            reuse_generated=reuse,
            policy=policy,
            promote_after_steps=patience,
        )

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
        adapter=st.sampled_from([None, None, "salt"]),
        min_tokens=st.sampled_from([0, 0, 1]),
        stop=st.sampled_from([(), (), ("ab",), ("e",)]),
    )
    def add(self, family, length, own, n, most, temperature, priority, logprobs, salt, adapter, min_tokens, stop):
        number = len(self.life.orders)
        # Long common beginnings, then a few tokens of its own.
        prompt = [5 + (family * 11 + i * i) % 25 for i in range(length)] + [5 + (number * 7 + i) % 25 for i in range(own)]
        self.life.add(
            prompt,
            n=n,
            max_tokens=most,
            temperature=temperature,
            priority=priority,
            prompt_logprobs=logprobs,
            cache_salt=salt,
            adapter=adapter,
            tenant=f"t{length % 3}",
            min_tokens=min_tokens,
            stop=stop,
        )

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        self.life.abort(number)

    @rule(number=st.integers(0, 30))
    def abort_in_flight(self, number):
        self.life.abort_in_flight(number)

    @rule(number=st.integers(0, 30))
    def preempt(self, number):
        self.life.preempt(number)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.life.step()

    @rule(number=st.integers(0, 30))
    def fail(self, number):
        self.life.fail(number)

    @rule(where=st.sampled_from(["before", "after", "update"]))
    def interrupt(self, where):
        self.life.interrupt(where)

    @rule()
    def reset_cache(self):
        self.life.reset()

    def teardown(self):
        if self.life is not None:
            self.life.end()


EngineLife.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestEngineLife = EngineLife.TestCase


@pytest.fixture
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="octavo")


def test_twenty_thousand_operations(quiet):  # E17
    counts = fuzz(20_000, seed=1)
    assert counts["operations"] >= 20_000
    assert all(counts[name] for name in (*OPERATIONS, *MUST_HAPPEN)), counts


# The fuzzer itself: each of these faults, planted into the engine, must be found soon.


def _copy_nothing(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "take_copies", lambda kv: kv.release_copies() or [])


def _write_shared_tails(monkeypatch):
    allocate = KVCacheManager.allocate_slots

    def without_copies(kv, request, *args):
        done = allocate(kv, request, *args)
        for copy in kv._copies.pop(request.request_id, ()):
            table = kv._holdings[request.request_id].tables[copy.group]
            table[table.index(copy.target)] = copy.source
            kv.pools[copy.group].release(copy.target)
        return done

    monkeypatch.setattr(KVCacheManager, "allocate_slots", without_copies)


def _forget_the_salt(monkeypatch):
    key = PrefixCache.key
    monkeypatch.setattr(PrefixCache, "key", lambda *args: key(*args)._replace(cache_salt=None))


def _forget_the_parent(monkeypatch):
    key = PrefixCache.key
    monkeypatch.setattr(PrefixCache, "key", lambda *args: key(*args)._replace(parent=0))


def _forget_the_kind(monkeypatch):
    key = PrefixCache.key
    monkeypatch.setattr(PrefixCache, "key", lambda *args: key(*args)._replace(num_prompt_tokens=0))


def _leak_the_sources_of_copies(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "release_copies", lambda kv: kv._copies_in_flight.clear())


def _free_twice(monkeypatch):
    free = KVCacheManager.free

    def twice(kv, request):
        first = [table[0] for table in kv._holdings[request.request_id].tables if table] if request.request_id in kv._holdings else []
        free(kv, request)
        for pool, block_id in zip(kv.pools, first, strict=False):
            if pool.ref_counts[block_id]:
                pool.release(block_id)

    monkeypatch.setattr(KVCacheManager, "free", twice)


def _lose_the_preempted(monkeypatch):
    preempt = Scheduler._preempt

    def lose(scheduler, request):
        preempt(scheduler, request)
        if request in scheduler.waiting:
            scheduler.waiting.remove(request, scheduler.step)

    monkeypatch.setattr(Scheduler, "_preempt", lose)


def _tell_the_worker_late(monkeypatch):
    output = WorkerView.output

    def without_drops(*args):
        made = output(*args)
        return dataclasses.replace(made, dropped_request_ids=made.dropped_request_ids[1:])

    monkeypatch.setattr(WorkerView, "output", without_drops)


@pytest.mark.parametrize(
    "plant",
    [
        _copy_nothing, _write_shared_tails, _forget_the_salt, _forget_the_parent, _forget_the_kind, _leak_the_sources_of_copies,
        _free_twice, _lose_the_preempted, _tell_the_worker_late,
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(plant, monkeypatch, quiet):
    plant(monkeypatch)
    with pytest.raises(FuzzFailure, match="--life"):
        fuzz(100_000, seed=2, shrink_for=0)  # most are found within the first 30,000


def test_a_failure_is_made_small_and_repeats(monkeypatch, quiet):
    _forget_the_salt(monkeypatch)
    with pytest.raises(FuzzFailure) as found:
        fuzz(20_000, seed=1, shrink_for=5)
    words = str(found.value).split()
    seed, number, keep = (words[words.index(flag) + 1] for flag in ("--seed", "--life", "--keep"))
    settings, adding, operations = plan(int(seed), int(number))
    places = [int(place) for place in keep.split(",")]
    assert len(places) <= 12 < len(operations)
    with pytest.raises(Exception):  # noqa: B017 - whatever it was
        live(settings, adding, [operations[place] for place in places])
    monkeypatch.undo()
    live(settings, adding, [operations[place] for place in places])


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
