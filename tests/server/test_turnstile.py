"""Many requests in one moment: a bounded number begins in each round of the event loop, all do, and in order."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from octavo.server.turnstile import TurnstileMiddleware

MOST = 4


def scope(path: str, number: int) -> dict[str, object]:
    return {"type": "http", "path": path, "number": number}


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_rounds(loop_factory):
    async def main():
        rounds = 0
        begun: list[tuple[int, int]] = []
        healthy: list[int] = []

        async def app(scope, receive, send):
            (healthy if scope["path"] == "/health" else begun).append(
                rounds if scope["path"] == "/health" else (rounds, scope["number"])  # type: ignore[arg-type]
            )

        turnstile = TurnstileMiddleware(app, MOST)
        tasks = [asyncio.create_task(turnstile(scope("/v1/completions", i), None, None)) for i in range(41)]
        tasks[7].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            rounds += 1
            if rounds == 3:
                tasks.append(asyncio.create_task(turnstile(scope("/health", 0), None, None)))
                tasks[20].cancel()  # while it waits
            assert rounds < 1000
        numbers = [number for _, number in begun]
        assert numbers == sorted(numbers) == [i for i in range(41) if i not in (7, 20)]
        sizes = [sum(turn == number for turn, _ in begun) for number in range(rounds + 1)]
        assert max(sizes) <= MOST and rounds >= 41 / MOST
        assert healthy == [healthy[0]] and healthy[0] <= 5 < begun[-1][0], "health does not wait for the others"
        # and an idle one lets the next in at once
        before = rounds
        await turnstile(scope("/v1/completions", 99), None, None)
        assert begun[-1] == (before, 99)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(main(), 30))
