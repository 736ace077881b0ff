"""The step arena: addresses follow the sequence of takes alone, arrays of open scopes never overlap, growth is safe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.arena import ALIGNMENT, Arena

DTYPES = (np.float32, np.int32, np.float64, np.uint8)
TAKES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300), st.sampled_from(DTYPES)), max_size=20)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@given(TAKES, st.lists(st.integers(0, 40), min_size=20, max_size=20))
def test_addresses_do_not_depend_on_row_counts(takes, other_rows):
    arena = Arena(40, chunk_bytes=1 << 14)  # small chunks: several are needed
    first = [address(arena.take(rows, cols, dtype)) for rows, cols, dtype in takes]
    arena.reset()
    second = [address(arena.take(rows, cols, dtype)) for rows, (_, cols, dtype) in zip(other_rows, takes, strict=False)]
    assert first == second
    assert arena.epoch == 0


@given(TAKES, TAKES)
def test_another_sequence_in_between_changes_nothing(takes, between):
    arena = Arena(40, chunk_bytes=1 << 14)
    first = [address(arena.take(*take)) for take in takes]
    arena.reset()
    for take in between:  # may add chunks
        arena.take(*take)
    arena.reset()
    assert [address(arena.take(*take)) for take in takes] == first


@given(TAKES)
def test_arrays_are_aligned_and_disjoint_at_full_capacity(takes):
    arena = Arena(40, chunk_bytes=1 << 14)
    spans = []
    for _, cols, dtype in takes:
        array = arena.take(40, cols, dtype)
        assert array.shape == (40, cols) and array.dtype == dtype and array.flags.c_contiguous
        assert address(array) % ALIGNMENT == 0
        if array.nbytes:
            spans.append((address(array), address(array) + array.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_scope_gives_back_what_was_taken_inside_and_nothing_else():
    arena = Arena(8)
    outer = arena.take(8, 16)
    with arena.scope():
        inner = address(arena.take(8, 16))
        with arena.scope():
            deepest = address(arena.take(8, 16))
        assert address(arena.take(1, 16)) == deepest
    assert address(arena.take(2, 16)) == inner != address(outer)


def test_scope_closes_on_an_exception():
    arena = Arena(8)
    with pytest.raises(RuntimeError), arena.scope():
        inside = address(arena.take(1, 4))
        raise RuntimeError
    assert address(arena.take(1, 4)) == inside


def test_tuple_shapes_share_the_address_of_their_flat_form():
    arena = Arena(8)
    with arena.scope():
        flat = arena.take(3, 24)
    shaped = arena.take(3, (4, 6))
    assert shaped.shape == (3, 4, 6) and address(shaped) == address(flat)


def test_a_repeated_take_is_the_same_object():
    arena = Arena(8)
    first = arena.take(3, 5)
    arena.reset()
    assert arena.take(3, 5) is first


@given(TAKES.filter(bool), st.integers(0, 19), st.integers(0, 40))
def test_a_take_is_found_again_by_its_position(takes, which, rows):
    """... for another number of rows, at the same address, with the same takes after it."""
    arena = Arena(40, chunk_bytes=1 << 14)
    arrays = [arena.take(*take) for take in takes]
    which %= len(takes)
    position = arena.position_of(arrays[which])
    again = arena.take_at(position, rows, *takes[which][1:])
    assert address(again) == address(arrays[which]) and again.shape[0] == rows
    assert [address(arena.take(*take)) for take in takes[which + 1 :]] == [address(array) for array in arrays[which + 1 :]]
    assert arena.position_of(arrays[which][:0]) is None and arena.position_of(np.zeros(3)) is None  # a part, and a stranger
    assert sum(buffer.nbytes for buffer in arena.buffers) == arena.reserved_bytes


def test_more_rows_than_capacity_grow_it_and_keep_living_arrays():
    arena = Arena(4, chunk_bytes=1 << 12)
    kept = arena.take(4, 8)
    kept[:] = 7
    big = arena.take(1000, 8)
    big[:] = 1
    assert arena.capacity_rows >= 1000 and arena.epoch == 1
    after = arena.take(1000, 8)
    after[:] = 2
    assert (kept == 7).all() and (big == 1).all()
    arena.reset()
    again = [address(arena.take(rows, 8)) for rows in (4, 1000, 3)]
    arena.reset()
    assert [address(arena.take(rows, 8)) for rows in (1, 2, 3)] == again
    assert arena.epoch == 1


def test_a_take_larger_than_a_chunk_gets_its_own():
    arena = Arena(4, chunk_bytes=256)
    arena.take(4, 4)[:] = 1
    arena.take(4, 10_000)[:] = 2
    assert arena.reserved_bytes >= 4 * 10_000 * 4


@settings(max_examples=5)
@given(st.integers(2, 6))
def test_memory_does_not_grow_with_steps_or_depth(layers):
    arena = Arena(16, chunk_bytes=1 << 14)

    def step(rows: int) -> None:
        arena.reset()
        x = arena.take(rows, 64)
        for _ in range(layers):
            with arena.scope():
                arena.take(rows, 192)
                arena.take(rows, (3, 64))
        arena.take(1, x.shape[1])

    step(16)
    held = arena.reserved_bytes
    for rows in (1, 7, 16):
        step(rows)
    assert arena.reserved_bytes == held <= 2 * (1 << 14)


def test_the_view_cache_is_bounded():
    arena = Arena(20_000)
    for rows in range(10_000):
        arena.reset()
        arena.take(rows, 1)
    assert len(arena._views) <= 8192


def test_no_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity_rows"):
        Arena(0)


def test_torch_buffers_and_views():
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    from octavo.ops.torch import TorchOps

    arena = TorchOps(8).arena
    first = arena.take(3, 5, torch.float32)
    second = arena.take(0, (2, 2), torch.float32)
    third = arena.take(8, 5, torch.bfloat16)
    assert first.shape == (3, 5) and second.shape == (0, 2, 2) and third.dtype == torch.bfloat16
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in (first, third))
    first.fill_(1)
    third.fill_(2)
    assert bool((first == 1).all())
    arena.reset()
    assert arena.take(7, 5, torch.float32).data_ptr() == first.data_ptr()
