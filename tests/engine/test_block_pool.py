"""BlockPool alone: free list order, reference counts, exact lookups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.block_pool import ROOT, BlockKey, BlockPool
from octavo.engine.metrics import EngineStats


def key(parent: int, *tokens: int, prompt: int | None = None, adapter: str | None = None, salt: str | None = None) -> BlockKey:
    return BlockKey(parent, tokens, len(tokens) if prompt is None else prompt, adapter, salt)


def pool_of(size: int) -> BlockPool:
    return BlockPool(size, EngineStats())


def test_a_cached_block_outlives_empty_ones_and_goes_in_order_of_last_use():
    pool = pool_of(4)
    a, b, c = pool.take(), pool.take(), pool.take()
    for block, token in ((a, 1), (b, 2), (c, 3)):
        pool.register(block, key(ROOT, token))
    for block in (b, a, c):  # freed in this order
        pool.release(block)
    pool.take()  # the fourth, never used
    assert pool.stats.blocks_evicted == 0
    pool.share(b), pool.release(b)  # b was used last of all
    assert [pool.take() for _ in range(3)] == [a, c, b]
    assert pool.stats.blocks_evicted == 3
    assert all(pool.lookup(key(ROOT, token)) is None for token in (1, 2, 3))
    with pytest.raises(KeyError):
        pool.take()


def test_a_used_block_without_content_is_taken_before_cached_ones():
    pool = pool_of(2)
    cached, plain = pool.take(), pool.take()
    pool.register(cached, key(ROOT, 1))
    pool.release(cached)
    pool.release(plain)
    assert pool.take() == plain


def test_a_second_block_of_equal_content_stays_private():
    pool = pool_of(2)
    first, second = pool.take(), pool.take()
    serial = pool.register(first, key(ROOT, 1))
    assert pool.register(second, key(ROOT, 1)) == serial
    assert pool.lookup(key(ROOT, 1)) == (first, serial)
    assert not pool.is_cached(second)
    pool.release(first)
    pool.release(second)
    assert pool.take() == second


def test_serials_are_never_used_again():
    pool = pool_of(1)
    seen = set()
    for _ in range(5):
        block = pool.take()  # evicts the previous content
        seen.add(pool.register(block, key(ROOT, 1)))
        pool.release(block)
    assert len(seen) == 5 and ROOT not in seen


def test_equal_hashes_do_not_make_equal_blocks(monkeypatch):  # E06
    monkeypatch.setattr(BlockKey, "__hash__", lambda self: 1)
    pool = pool_of(8)
    first = pool.register(pool.take(), key(ROOT, 1, 2))
    second = pool.register(pool.take(), key(ROOT, 3, 4))
    child = pool.register(pool.take(), key(first, 1, 2))
    assert len({first, second, child}) == 3
    assert pool.lookup(key(second, 1, 2)) is None
    assert pool.lookup(key(first, 1, 2)).serial == child


def test_every_field_of_the_key_counts():  # E07, E08
    pool = pool_of(8)
    pool.register(pool.take(), key(ROOT, 1, 2, adapter="S"))
    for other in (key(ROOT, 1, 2), key(ROOT, 1, 2, salt="S"), key(ROOT, 1, 2, adapter="T"), key(ROOT, 1, 2, prompt=1, adapter="S")):
        assert pool.lookup(other) is None
    assert pool.lookup(key(ROOT, 1, 2, adapter="S")) is not None


def test_releasing_too_often_is_caught():
    pool = pool_of(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_invariants_notice_a_lost_and_a_doubly_held_block():
    pool = pool_of(2)
    block = pool.take()
    pool.check_invariants({block: 1})
    for holders in ({}, {block: 2}, {block: 1, 1 - block: 1}):
        with pytest.raises(AssertionError):
            pool.check_invariants(holders)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "register", "lookup", "reset"]), st.integers(0, 7)), max_size=60))
def test_any_sequence_of_calls_keeps_the_account(calls):
    pool, held = pool_of(4), {}
    for call, number in calls:
        if call == "take" and pool.num_free:
            held[pool.take()] = 1
        elif call == "lookup":
            found = pool.lookup(key(ROOT, number))
            if found is not None:
                pool.share(found.block_id)
                held[found.block_id] = held.get(found.block_id, 0) + 1
        elif call == "reset":
            pool.reset()
        elif held:
            block = sorted(held)[number % len(held)]
            if call == "share":
                pool.share(block)
                held[block] += 1
            elif call == "register" and not pool.is_cached(block):
                pool.register(block, key(ROOT, number))
            elif call == "release":
                pool.release(block)
                held[block] -= 1
                held = {b: n for b, n in held.items() if n}
        pool.check_invariants(held)
