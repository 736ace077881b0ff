"""KVCacheManager alone: hits, copies, forks, and what may be found when."""

from __future__ import annotations

import pytest

from octavo.engine.executor import KVGroup
from octavo.engine.kv_cache_manager import KVCacheManager, Terms
from octavo.engine.metrics import EngineStats
from octavo.engine.request import Request
from tests.engine.fake import request


def manager(num_blocks: int = 16, block_size: int = 4, groups: int = 1, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(tuple(KVGroup(num_blocks, block_size) for _ in range(groups)), caching, EngineStats())


def make(name: str, prompt, index: int = 1, **fields) -> Request:
    return Request(request(name, prompt, **fields), index)


def computed(kv: KVCacheManager, name: str, prompt, **fields) -> Request:
    """A request whose whole prompt has been computed and committed."""
    made = make(name, prompt, **fields)
    assert kv.admit(made)
    kv.take_copies()
    made.num_computed_tokens = made.num_target_tokens
    kv.commit(made)
    kv.release_copies()
    return made


def table(kv: KVCacheManager, made: Request) -> list[int]:
    return kv.block_tables(made)[0]


def test_blocks_are_findable_only_after_commit():
    kv = manager()
    first = make("a", range(8))
    assert kv.admit(first)
    second = make("b", range(8))
    assert kv.admit(second) and second.num_computed_tokens == 0
    first.num_computed_tokens = 4  # a chunk came back
    kv.commit(first)
    third = make("c", range(8))
    assert kv.admit(third) and third.num_computed_tokens == 4
    assert table(kv, third)[0] == table(kv, first)[0] and table(kv, third)[1] != table(kv, first)[1]
    kv.check_invariants([first, second, third])


@pytest.mark.parametrize("block_size, length", [(4, 4), (4, 8), (1, 3), (4, 9), (4, 11)])
def test_a_fully_cached_prompt_recomputes_its_last_token_in_a_block_of_its_own(block_size, length):  # E02
    kv = manager(block_size=block_size)
    first = computed(kv, "a", range(length))
    second = make("b", range(length))
    assert kv.admit(second)
    full = length // block_size * block_size
    assert second.num_computed_tokens == min(full, length - 1)
    copies = kv.take_copies()
    if full == length and block_size > 1:
        assert [(c.source, c.target) for c in copies] == [(table(kv, first)[-1], table(kv, second)[-1])]
    else:
        assert copies == []
    assert table(kv, first)[-1] != table(kv, second)[-1]
    kv.check_invariants([first, second])
    kv.release_copies()
    kv.check_invariants([first, second])


def test_the_source_of_a_copy_is_held_until_the_step_has_run():
    kv = manager(num_blocks=4)
    first = computed(kv, "a", range(8))
    kv.free(first)
    second = make("b", range(8))
    assert kv.admit(second) and kv.pools[0].num_free == 1  # two of its own, the source, one free
    (copy,) = kv.take_copies()
    assert copy.source not in table(kv, second)
    third = make("c", range(100, 108))
    assert not kv.admit(third)
    kv.release_copies()
    assert kv.admit(third)
    kv.check_invariants([second, third])


def test_without_room_for_the_copy_the_last_block_is_computed_again():
    kv = manager(num_blocks=2)
    kv.free(computed(kv, "a", range(8)))
    second = make("b", range(8))
    assert kv.admit(second)
    assert second.num_computed_tokens == 4 and kv.take_copies() == []
    kv.check_invariants([second])


def test_freeing_before_the_step_takes_the_copy_back():
    kv = manager()
    computed(kv, "a", range(8))
    second = make("b", range(8))
    kv.admit(second)
    kv.free(second)
    assert kv.take_copies() == []


IDENTITIES = [{}, {"cache_salt": "S"}, {"adapter": "S"}, {"adapter": "T"}, {"adapter": "S", "cache_salt": "S"}]


@pytest.mark.parametrize("mine", IDENTITIES)
@pytest.mark.parametrize("other", IDENTITIES)
def test_salt_and_adapter_separate_prefixes(mine, other):  # E07, E08
    kv = manager()
    computed(kv, "a", range(8), **mine)
    second = make("b", range(8), **other)
    assert kv.admit(second) and second.num_computed_tokens == (7 if mine == other else 0)


def test_generated_tokens_are_no_prompt():
    """The next turn of a chat computes the last answer again, as prompt; the same request resumed does not."""
    kv = manager()
    first = make("a", range(4))
    kv.admit(first)
    first.token_ids += [50, 51, 52, 53]
    kv.allocate_slots(first, 8)
    first.num_computed_tokens = 8
    kv.commit(first)
    kv.free(first)
    turn = make("b", [0, 1, 2, 3, 50, 51, 52, 53, 9])
    assert kv.admit(turn) and turn.num_computed_tokens == 4
    first.token_ids += [54]
    first.num_computed_tokens = 0
    assert kv.admit(first) and first.num_computed_tokens == 8


def test_same_tokens_after_another_parent_are_another_block():  # E06
    kv = manager()
    computed(kv, "a", [1, 1, 1, 1, 7, 7, 7, 7, 0])
    other = computed(kv, "b", [2, 2, 2, 2, 7, 7, 7, 7, 0])
    assert kv.stats.prefix_hit_tokens == 0
    again = make("c", [2, 2, 2, 2, 7, 7, 7, 7, 0])
    assert kv.admit(again) and again.num_computed_tokens == 8
    assert table(kv, again)[:2] == table(kv, other)[:2]


def test_children_share_everything_and_copy_only_the_partial_tail():
    kv = manager()
    parent = computed(kv, "p", range(10), n=3)
    assert parent.num_computed_tokens == 9 and len(table(kv, parent)) == 3
    original = list(table(kv, parent))
    children = parent.make_children()
    for child in children[:2]:
        assert kv.fork(parent, child, last=False)
        assert table(kv, child)[:2] == original[:2] and table(kv, child)[2] != original[2]
    kv.take_copies()
    kv.release_copies()  # the step of the first two has run
    used = kv.num_used_blocks
    assert kv.fork(parent, children[2], last=True)
    assert table(kv, children[2]) == original  # the parent's own tail, written in place
    assert kv.num_used_blocks == used and kv.stats.forks == 3
    kv.check_invariants(children)


def test_a_fork_that_does_not_fit_changes_nothing():
    kv = manager(num_blocks=3)
    parent = computed(kv, "p", range(10), n=2)
    first, second = parent.make_children()
    assert not kv.fork(parent, first, last=False)
    kv.check_invariants([parent])
    assert kv.fork(parent, second, last=True)
    kv.check_invariants([second])


def test_a_last_fork_that_does_not_fit_gives_the_blocks_back():
    kv = manager(num_blocks=2, block_size=2)
    kv.free(computed(kv, "a", range(4)))
    parent = make("p", range(4), n=2)
    assert kv.admit(parent) and parent.num_missing_tokens == 0  # two cached blocks, read only
    child = parent.make_children()[1]
    assert not kv.fork(parent, child, last=True)
    kv.check_invariants([parent])


def test_groups_hit_together_and_are_allocated_together():
    kv = manager(groups=2)
    computed(kv, "a", range(8))
    second = make("b", range(9))
    assert kv.admit(second) and second.num_computed_tokens == 8
    assert [len(t) for t in kv.block_tables(second)] == [3, 3]
    kv.pools[1].reset()  # one group has lost it: no hit in either
    third = make("c", range(9))
    assert kv.admit(third) and third.num_computed_tokens == 0
    with pytest.raises(ValueError, match="one block size"):
        KVCacheManager((KVGroup(4, 4), KVGroup(4, 8)), True, EngineStats())


def test_reset_hides_what_running_requests_have_and_will_compute():
    kv = manager()
    first = make("a", range(8))
    kv.admit(first)
    first.num_computed_tokens = 4
    kv.commit(first)
    half = make("h", range(50, 58))
    kv.admit(half)
    half.num_computed_tokens = 2  # nothing findable yet, but computed before the reset
    kv.reset_prefix_cache()
    for running in (first, half):
        running.num_computed_tokens = 8
        kv.commit(running)
    second, third = make("b", range(8)), make("c", range(50, 58))
    assert kv.admit(second) and second.num_computed_tokens == 0
    assert kv.admit(third) and third.num_computed_tokens == 0
    kv.check_invariants([first, half, second, third])


def test_reset_hides_what_children_take_over_from_a_parent():
    kv = manager()
    parent = make("p", range(9), n=2)
    kv.admit(parent)
    parent.num_computed_tokens = 8
    kv.reset_prefix_cache()
    for child in parent.make_children():
        assert kv.fork(parent, child, last=child.choice == 1)
        child.num_computed_tokens = 9
        kv.commit(child)
    later = make("b", range(9))
    assert kv.admit(later) and later.num_computed_tokens == 0


def test_prompt_logprobs_and_disabled_caching_hit_nothing():
    kv = manager()
    computed(kv, "a", range(8))
    second = make("b", range(8), prompt_logprobs=0)
    assert kv.admit(second) and second.num_computed_tokens == 0
    kv = manager(caching=False)
    computed(kv, "a", range(8))
    third = make("c", range(8))
    assert kv.admit(third) and third.num_computed_tokens == 0 and kv.pools[0].num_cached == 0


def test_headroom_is_asked_for_beside_the_blocks():
    kv = manager(num_blocks=4)
    assert not kv.admit(make("a", range(8)), Terms(headroom=3))
    kv.check_invariants([])
    assert kv.admit(make("a", range(8)), Terms(headroom=2))


def test_a_running_request_never_writes_a_shared_block():
    kv = manager()
    first = computed(kv, "a", range(6))
    kv.pools[0].share(table(kv, first)[1])
    first.known_to_worker = True
    first.token_ids.append(5)
    with pytest.raises(AssertionError, match="shared block would be written"):
        kv.allocate_slots(first, 7)


def test_a_very_long_chain_needs_no_recursion():  # E19
    length = 100_000
    kv = manager(num_blocks=length + 10, block_size=1)
    first = computed(kv, "a", range(length))
    kv.free(first)
    second = make("b", range(length))
    assert kv.admit(second) and second.num_computed_tokens == length - 1
    kv.free(second)
    third = make("c", range(length, 2 * length))
    assert kv.admit(third)
    assert kv.stats.blocks_evicted >= length - 10


def test_a_snapshot_says_who_holds_what():
    kv = manager(num_blocks=6, groups=2)
    assert [view[2:] for view in kv.snapshot()] == [((), 0, False)] * 12
    first = computed(kv, "a", range(8))
    second = make("b", range(8))  # the hit covers all of it: its last block is copied before the next step
    assert kv.admit(second)
    third = make("c", range(100, 103))
    assert kv.admit(third)
    kv.check_invariants([first, second, third])
    views = kv.snapshot()
    assert [(view.group, view.block_id) for view in views] == [(group, block) for group in range(2) for block in range(6)]
    for group in range(2):
        mine = {view.block_id: view for view in views if view.group == group}
        tables = {made.request_id: kv.block_tables(made)[group] for made in (first, second, third)}
        assert mine[tables["a"][0]][2:] == ((("a", 0), ("b", 0)), 2, True)
        assert mine[tables["a"][1]][2:] == ((("a", 1), ("b", -1)), 2, True)
        assert mine[tables["b"][1]][2:] == ((("b", 1),), 1, False)
        assert mine[tables["c"][0]][2:] == ((("c", 0),), 1, False)
    kv.take_copies()
    kv.release_copies()
    kv.free(first)
    assert [view.cached for view in kv.snapshot() if not view.ref_count].count(True) == 2  # free, and still findable
    kv.free(second)
    kv.free(third)
    assert all(view.holders == () and view.ref_count == 0 for view in kv.snapshot())


def test_a_snapshot_counts_every_reference_between_steps():
    """Whatever is shared: after a step the holders it names are as many as the pool counts."""
    kv = manager(num_blocks=32)
    parent = computed(kv, "p", range(10), n=3)
    children = parent.make_children()
    for number, child in enumerate(children):
        assert kv.fork(parent, child, last=number == 2)
    kv.take_copies()
    kv.release_copies()
    views = kv.snapshot()
    assert all(len(view.holders) == view.ref_count for view in views)
    assert max(view.ref_count for view in views) == 3
    assert {holder.request_id for view in views for holder in view.holders} == {child.request_id for child in children}
