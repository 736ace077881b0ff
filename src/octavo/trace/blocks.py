"""Who held which KV block while a step ran, rebuilt from the steps before it.

Stateless but for the replay itself. The record of a step tells which tables it lengthened and which requests lost theirs, so that
the tables of any step follow from those before it. html.py does the same in the page.
Blocks that a group with a sliding window lets go while their request runs are not told: they stay its until it ends.
Not here: drawing.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.trace.record import Trace

#: Per KV group: block -> (request id, place in its table) of each holder, in order of request.
Holders = list[dict[int, list[tuple[str, int]]]]


def tables(trace: Trace) -> Iterator[dict[str, list[list[int]]]]:
    """For each step the block tables of the requests that held any as it ran: request id -> per group its blocks."""
    groups = max(1, len(trace.num_blocks))
    now: dict[str, list[list[int]]] = {}
    for event in trace.steps:
        for name in event.dropped:
            now.pop(name, None)
        for entry in event.entries:
            if entry.blocks:
                table = now.setdefault(entry.request_id, [[] for _ in range(groups)])
                for group, added in zip(table, entry.blocks, strict=False):
                    group.extend(added)
        yield {name: [list(group) for group in table] for name, table in now.items()}


def holders(of: dict[str, list[list[int]]], groups: int) -> Holders:
    found: Holders = [{} for _ in range(groups)]
    for name, table in of.items():
        for group, blocks in enumerate(table[:groups]):
            for place, block in enumerate(blocks):
                if block >= 0:  # else a place behind a sliding window, which never had one
                    found[group].setdefault(block, []).append((name, place))
    return found
