"""When a stream's reader is woken: at once for the first tokens, an ending and an error, else when enough are there."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.mailbox import Mailbox
from octavo.errors import EngineDeadError
from octavo.outputs import CompletionDelta


def delta(number: int, choice: int = 0, finish: bool = False) -> CompletionDelta:
    return CompletionDelta("a", choice, str(number), [number], finish_reason="stop" if finish else None)


def read(mailbox: Mailbox, puts: list[CompletionDelta]) -> list[list[CompletionDelta]]:
    """The batches a reader gets that is always waiting when a delta comes."""

    async def main() -> list[list[CompletionDelta]]:
        batches: list[list[CompletionDelta]] = []

        async def reader() -> None:
            while True:
                batches.append(await mailbox.take())

        task = asyncio.create_task(reader())
        for one in puts:
            for _ in range(3):
                await asyncio.sleep(0)
            mailbox.put(one)
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        return batches

    return asyncio.run(main())


def test_one_choice():
    puts = [delta(i) for i in range(10)] + [delta(10, finish=True)]
    assert [len(batch) for batch in read(Mailbox({"a": 1}), puts)] == [1] * 11
    assert [len(batch) for batch in read(Mailbox({"a": 1}, 4), puts)] == [1, 4, 4, 2], "first at once, then fours, the ending at once"


def test_the_interval_is_of_the_choices_that_go_on():
    puts = [delta(0, 0), delta(0, 1), delta(1, 0), delta(1, 1), delta(2, 0), delta(2, 1, finish=True), *(delta(i, 0) for i in range(3, 8))]
    assert [len(batch) for batch in read(Mailbox({"a": 2}, 2), puts)] == [1, 4, 1, 2, 2], "two of each while there are two, then two"


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.lists(st.integers(0, 2), max_size=40))
def test_nothing_is_lost_or_reordered(interval: int, choices: list[int]):
    puts = [delta(i, choice) for i, choice in enumerate(choices)] + [delta(100 + c, c, finish=True) for c in range(3)]
    batches = read(Mailbox({"a": 3}, interval), puts)
    assert [one for batch in batches for one in batch] == puts and all(batches)


def test_an_error_does_not_wait():
    async def main() -> None:
        mailbox = Mailbox({"a": 1}, 10)
        mailbox.put(delta(0))
        assert len(await mailbox.take()) == 1
        task = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(delta(1))
        await asyncio.sleep(0)
        assert not task.done()
        mailbox.fail(EngineDeadError("gone"))
        assert len(await task) == 1
        with pytest.raises(EngineDeadError):
            await mailbox.take()

    asyncio.run(asyncio.wait_for(main(), 10))
