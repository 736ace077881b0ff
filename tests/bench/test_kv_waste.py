"""The benchmark of KV waste on a shorter run: its counting is right where it can be done by hand, and the promises hold."""

from __future__ import annotations

from benchmarks.kv_waste import BLOCK, LEAST_USE, fork, make_core, mixed, order


def test_slots_of_one_request_by_hand():
    """20 prompt tokens in steps of 8, 2 more drawn: three steps of a prompt, then one decode; two blocks all the time."""
    core, executor = make_core(blocks=10, seqs=4, budget=8)
    core.add_request(order("r", list(range(20)), 2))
    while core.has_unfinished_requests():
        core.step()
    assert [(step.allocated, step.live, step.due) for step in executor.counts] == [
        (2 * BLOCK, 8, 20),
        (2 * BLOCK, 16, 20),
        (2 * BLOCK, 20, 20),
        (2 * BLOCK, 21, 21),
    ]


def test_shared_blocks_count_once():
    core, executor = make_core(blocks=20, seqs=4, budget=64)
    core.add_request(order("r", list(range(30)) + [1, 2], 3, n=4))
    while core.has_unfinished_requests():
        core.step()
    last = executor.counts[-1]
    assert (last.blocks, last.live) == (1 + 4 * 2, BLOCK + 4 * (BLOCK + 2))  # one block for all; two for each


def test_the_promises_hold():
    lengths = mixed(requests=150, blocks=512, seqs=64, budget=512)
    assert lengths["preemptions"] > 0 and lengths["steps_while_requests_wait"] > 100
    assert all(lengths["live"][name] >= LEAST_USE for name in ("mean", "by_tokens", "at_load"))
    answers = fork(prompt=1000, tokens=100, n=8, budget=512)
    assert answers["blocks_held_at_most"] <= answers["bound"] < answers["blocks_without_sharing"] / 4
