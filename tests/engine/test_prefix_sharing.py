"""One beginning, computed once: requests that arrive together, what becomes of those that wait, and the turns of a chat."""

from __future__ import annotations

import logging

import pytest

from octavo.engine.executor import KVGroup
from octavo.engine.kv_cache_manager import KVCacheManager
from octavo.engine.metrics import EngineStats
from octavo.engine.request import MOST_FOLLOWING_STEPS, Request
from tests.engine.fake import Collector, check_against_reference, finish, make_core, request, run


def letters(length: int, start: int = 5) -> list[int]:
    return [5 + (start * 3 + i * 7) % 25 for i in range(length)]


@pytest.mark.parametrize("budget", [7, 16, 512])
@pytest.mark.parametrize("length", [32, 33, 46])
def test_a_beginning_shared_by_requests_of_one_step_is_computed_once(budget, length):
    core = make_core(block_size=4, max_num_batched_tokens=budget)
    shared = letters(length)
    orders = [request(f"r{i}", [*shared, 6 + i], max_tokens=1, eos=False) for i in range(6)]
    check_against_reference(run(core, orders), orders, core.executor.info)
    whole = length // 4 * 4
    assert core.stats.prompt_tokens_computed == whole + 6 * (length + 1 - whole)
    assert core.stats.prefix_hit_tokens == 5 * whole
    assert core.stats.prefix_waits == 5 or budget < 512  # where the first one takes the whole step, the others just wait


def test_equal_prompts_compute_their_last_token_each_and_nothing_else():
    core = make_core(block_size=4)
    orders = [request(f"r{i}", letters(32), max_tokens=2, eos=False) for i in range(5)]
    check_against_reference(run(core, orders), orders, core.executor.info)
    assert core.stats.prompt_tokens_computed == 32 + 4


def test_a_tree_of_beginnings_is_computed_once():
    core = make_core(block_size=4)
    trunk, branches = letters(16), [letters(12, i) for i in (1, 2)]
    orders = [request(f"r{i}{j}", trunk + branches[i] + [6 + j], max_tokens=1, eos=False) for i in range(2) for j in range(3)]
    check_against_reference(run(core, orders), orders, core.executor.info)
    assert core.stats.prompt_tokens_computed == 16 + 2 * 12 + 6


@pytest.mark.parametrize("fields", [{"cache_salt": "S"}, {"adapter": "S"}, {"prompt_logprobs": 0}])
def test_what_shares_no_blocks_waits_for_nobody(fields):
    core = make_core(block_size=4)
    orders = [request("a", letters(20), max_tokens=1, eos=False), request("b", letters(20), max_tokens=1, eos=False, **fields)]
    check_against_reference(run(core, orders), orders, core.executor.info)
    assert core.stats.prefix_waits == 0 and core.stats.prompt_tokens_computed == 40
    core = make_core(block_size=4, enable_prefix_caching=False)
    run(core, orders[:1] + [request("c", letters(20), max_tokens=1, eos=False)])
    assert core.stats.prefix_waits == 0


def started(core, orders) -> Collector:
    """Steps until all but the first one follow: each is looked at when its turn as the first in the queue has come."""
    collector = Collector()
    for order in orders:
        collector.expect(order)
        core.add_request(order)
    while len(core.scheduler.followers) < len(orders) - 1:
        assert core.scheduler.step < 30, "nobody follows"
        collector.add(core.step())
    return collector


def test_the_first_one_is_aborted_and_the_next_goes_on_from_what_it_left():
    core = make_core(block_size=4, max_num_batched_tokens=8, max_stalled_steps=3)
    orders = [request(f"r{i}", [*letters(100), 6 + i], max_tokens=2, eos=False) for i in range(4)]
    collector = started(core, orders)
    assert core.stats.waiting == 3 and 16 <= core._requests["r0"].num_computed_tokens < 100
    collector.add(core.abort(["r0"]))
    finish(core, collector)
    check_against_reference({o.request_id: collector.outputs[o.request_id] for o in orders[1:]}, orders[1:], core.executor.info)
    assert core.stats.prompt_tokens_computed == 100 + 3  # what the first one computed is not lost


def test_the_first_one_is_preempted():
    core = make_core(num_blocks=30, block_size=4, max_num_batched_tokens=8, max_stalled_steps=3)
    orders = [request(f"r{i}", [*letters(80), 6 + i], max_tokens=2, eos=False, priority=5) for i in range(3)]
    collector = started(core, orders)
    urgent = request("urgent", letters(90, 3), max_tokens=2, eos=False)
    collector.expect(urgent)
    core.add_request(urgent)
    finish(core, collector)
    assert core.stats.preemptions >= 1 and core.stats.prefix_waits >= 2
    check_against_reference(collector.outputs, [*orders, urgent], core.executor.info)


def test_followers_are_aborted_and_counted_as_waiting():
    core = make_core(block_size=4, max_num_batched_tokens=8, max_stalled_steps=3, max_waiting_requests=3)
    collector = started(core, [request(f"r{i}", [*letters(80), 6 + i], max_tokens=2, eos=False) for i in range(3)])
    assert len(core.scheduler.waiting) == 0 and core.stats.waiting == 2 and core.stats.waiting_tokens == 2 * 81
    core.add_request(request("r3", [7], max_tokens=1))
    assert not core.has_room(request("r4", [7]))
    core.abort(["r3"])
    core.abort(["r1", "r2"])
    assert core.stats.waiting == 0 and core.stats.waiting_tokens == 0 and len(core.scheduler.followers) == 0
    core.check_invariants()
    while core.has_unfinished_requests():
        core.step()
    assert collector.outputs


def test_nobody_follows_for_longer_than_stated():
    """The first one gets at most two tokens a step; after MOST_FOLLOWING_STEPS steps the second one computes for itself."""
    core = make_core(block_size=4, num_blocks=400, max_model_len=900, max_num_batched_tokens=2)
    orders = [request(f"r{i}", [*letters(200), 6 + i], max_tokens=1, eos=False) for i in range(2)]
    collector = started(core, orders)
    second, begun = core._requests["r1"], core.scheduler.step
    while second in core.scheduler.followers:
        collector.add(core.step())
    assert core.scheduler.step - begun == MOST_FOLLOWING_STEPS and second.follow_steps_left == 0
    finish(core, collector)
    check_against_reference(collector.outputs, orders, core.executor.info)


def steps_of_an_urgent_one(shared: bool) -> int:
    """Beside three prompts of priority 5 and one of priority 9, whose beginning it shares or not; budget 8 a step."""
    core = make_core(block_size=4, num_blocks=400, max_model_len=900, max_num_batched_tokens=8)
    slow = letters(240, 8)
    orders = [request("low", slow, max_tokens=2, eos=False, priority=9)]
    collector = Collector()
    for i in range(4):
        for order in orders:
            collector.expect(order)
            core.add_request(order)
        collector.add(core.step())
        orders = [request(f"m{i}", letters(240, i), max_tokens=2, eos=False, priority=5)] if i < 3 else []
    while len(core.scheduler.prefilling) < 4:
        collector.add(core.step())
    prompt = [*(slow[:238] if shared else letters(238, 11)), 9, 9]
    urgent = request("urgent", prompt, max_tokens=1, eos=False, priority=-9)
    collector.expect(urgent)
    core.add_request(urgent)
    begun, leader = core.scheduler.step, core._requests["low"].num_computed_tokens
    while core.has_request("urgent"):
        collector.add(core.step())
    steps = core.scheduler.step - begun
    assert core.stats.prefix_waits == shared and 0 < leader < 100
    finish(core, collector)
    check_against_reference({"urgent": collector.outputs["urgent"]}, [urgent], core.executor.info)
    return steps


def test_an_urgent_follower_waits_no_longer_than_if_it_computed_all_itself():
    """What it follows goes as early as it would, however little urgent it is itself."""
    assert steps_of_an_urgent_one(shared=True) <= steps_of_an_urgent_one(shared=False)


def test_a_reset_in_between_costs_the_sharing_and_nothing_else():
    core = make_core(block_size=4, max_num_batched_tokens=8, max_stalled_steps=3)
    orders = [request(f"r{i}", [*letters(80), 6 + i], max_tokens=2, eos=False) for i in range(3)]
    collector = started(core, orders)
    core.reset_prefix_cache()
    finish(core, collector)
    check_against_reference(collector.outputs, orders, core.executor.info)
    assert core.stats.prefix_hit_tokens <= 80


# The cache itself


def manager(num_blocks: int = 16, **settings) -> KVCacheManager:
    return KVCacheManager((KVGroup(num_blocks, 4),), True, EngineStats(), **settings)


def computed(kv: KVCacheManager, name: str, prompt, num_prompt: int | None = None) -> Request:
    made = Request(request(name, prompt[:num_prompt]), 1)
    made.token_ids = list(prompt)
    assert kv.admit(made)
    kv.take_copies()
    made.num_computed_tokens = made.num_target_tokens
    kv.commit(made)
    kv.release_copies()
    return made


def hit(kv: KVCacheManager, prompt) -> int:
    return len(kv.prefixes.match(Request(request("?", prompt), 9))[0][0])


def test_the_least_recently_used_prefix_goes_first_and_from_its_end():
    kv = manager(num_blocks=12)
    prompts = {name: letters(12, start) for name, start in (("a", 1), ("b", 2), ("c", 3))}
    for name, prompt in prompts.items():
        kv.free(computed(kv, name, prompt))
    kv.free(computed(kv, "a", [*prompts["a"], 7]))  # used again: now b is the oldest
    lengths = []
    for i in range(8):
        taken = computed(kv, f"t{i}", [30 - i, 1, 2])  # one block each, held
        lengths.append(tuple(hit(kv, prompts[name]) for name in "bca"))
        assert taken
    assert lengths == [*[(3, 3, 3)] * 3, (2, 3, 3), (1, 3, 3), (0, 3, 3), (0, 2, 3), (0, 1, 3)]


def test_hashes_of_blocks_depend_on_a_secret_and_equality_on_the_tokens():
    one, other = manager(), manager()
    made, same, near = (
        Request(request(name, tokens), 1) for name, tokens in (("a", [5, 6, 7, 8]), ("b", [5, 6, 7, 8]), ("c", [5, 6, 7, 9]))
    )
    assert one.prefixes.key(made, 0, 0) == one.prefixes.key(same, 0, 0) != one.prefixes.key(near, 0, 0)
    assert hash(one.prefixes.key(made, 0, 0)) != hash(other.prefixes.key(made, 0, 0))
    assert len(one.prefixes._secret) >= 16 and one.prefixes._secret != other.prefixes._secret
    large = Request(request("d", [2**40, 1, 2, 3]), 1)
    assert one.prefixes.key(large, 0, 0) != one.prefixes.key(Request(request("e", [0, 1, 2, 3]), 1), 0, 0)


# Turns of a chat


def chat(reuse: bool) -> list[tuple[int, int, int]]:
    """Of each of five turns: tokens of the prompt, of the prompt before, cached tokens. By the KV manager alone, blocks of 4."""
    kv = manager(num_blocks=200, reuse_generated=reuse)
    conversation, found, before = letters(10), [], 0
    for turn in range(5):
        made = Request(request(f"t{turn}", conversation), turn)
        assert kv.admit(made)
        cached = made.num_computed_tokens
        found.append((len(conversation), before, cached))
        before = len(conversation)
        made.num_computed_tokens = made.num_tokens
        kv.commit(made)
        for token in letters(7, turn):  # the answer
            made.token_ids.append(token)
            assert kv.allocate_slots(made, made.num_tokens)
            made.num_computed_tokens = made.num_tokens
            kv.commit(made)
        kv.take_copies(), kv.release_copies()
        conversation = [*made.token_ids, *letters(5, 50 + turn)]  # the next question
        kv.free(made)
    return found


def test_the_next_turn_hits_everything_but_the_last_answer():
    assert all(cached == before // 4 * 4 for _, before, cached in chat(reuse=False))


def test_with_reuse_generated_it_hits_the_answer_too():
    assert all(cached == ((before + 7) // 4 * 4 if before else 0) for _, before, cached in chat(reuse=True))


def test_reuse_generated_says_once_what_it_gives_up(caplog):
    with caplog.at_level(logging.WARNING, logger="octavo"):
        core = make_core(reuse_generated=True)
        run(core, [request("a", letters(9), max_tokens=2, eos=False)])
        core._start_fresh()
    found = [record.message for record in caplog.records if "reuse_generated" in record.message]
    assert len(found) == 1 and "not bit for bit" in found[0]
