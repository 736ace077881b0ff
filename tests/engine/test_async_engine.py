"""AsyncLLM around a fake model: many tasks, cancelled readers, aborts, a dying engine."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.sampling_params import SamplingParams
from tests.engine.fake import EOS, FakeExecutor, FakeTemplate, FakeTokenizer
from tests.engine.test_llm import GREEDY, alone

ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def make_llm(num_blocks: int = 200, step_seconds: float = 0.0, **settings) -> AsyncLLM:
    executor = FakeExecutor(num_blocks)
    if step_seconds:
        executor.before_step = lambda output: time.sleep(step_seconds)
    return AsyncLLM.from_parts(
        executor, FakeTokenizer(), chat_template=FakeTemplate(), eos_token_ids=frozenset({EOS}), config=EngineConfig(**settings)
    )


async def text_of(stream, index: int = 0) -> str:
    return "".join([delta.text async for delta in stream if delta.index == index])


async def idle(llm: AsyncLLM) -> None:
    """Wait until the thread has nothing left to do."""
    for _ in range(500):
        stats = llm.stats()
        if stats.running == stats.waiting == stats.holding == stats.blocks_used == 0 and not llm._routes:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the engine does not come to rest: {llm.stats()}")


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("octavo")]


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_many_tasks_get_what_each_would_get_alone():
    async def main():
        async with make_llm(num_blocks=12, max_num_seqs=4) as llm:
            prompts = ["abc", "bcd", "cde", "def", "efg", "fgh", "ghi", "hij"] * 2
            texts = await asyncio.gather(*(text_of(llm.generate(prompt, GREEDY)) for prompt in prompts))
            assert texts == [alone(prompt) for prompt in prompts]
            await idle(llm)
            assert llm.stats().requests_finished == 16 and len(await llm.events(1)) == 1

    run(main())


def test_n_and_chat():
    async def main():
        async with make_llm() as llm:
            params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
            deltas = [delta async for delta in llm.generate("abc", params, "mine")]
            assert {d.request_id for d in deltas} == {"mine"}
            assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]
            assert await text_of(llm.chat([{"role": "user", "content": "hi"}], GREEDY)) == alone(FakeTokenizer().encode("uhia"))

    run(main())


def test_a_cancelled_reader_aborts_its_request_only():  # A10
    async def main():
        async with make_llm(step_seconds=0.001, max_num_seqs=2) as llm:
            for _ in range(20):
                started = asyncio.Event()

                async def read(started=started):
                    async for _ in llm.generate("abc", ENDLESS):
                        started.set()

                tasks = [asyncio.create_task(read()) for _ in range(2)]
                await started.wait()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert await text_of(llm.generate("xyz", GREEDY)) == alone("xyz")
            await idle(llm)
            assert llm.stats().requests_aborted >= 20

    run(main())


def test_closing_a_stream_aborts_it_at_once():
    async def main():
        async with make_llm(step_seconds=0.001) as llm:
            stream = llm.generate("abc", ENDLESS)
            await anext(stream)
            await stream.aclose()
            await idle(llm)
            assert llm.stats().requests_aborted == 1

    run(main())


def test_abort_ends_the_stream_with_its_reason():  # A12
    async def main():
        async with make_llm(step_seconds=0.001) as llm:
            reasons, count = [], 0
            async for delta in llm.generate("abc", ENDLESS, "mine"):
                count += 1
                if count == 3:
                    await llm.abort("mine")
                    await llm.abort("mine")
                reasons.append(delta.finish_reason)
            assert reasons[-1] == "abort" and set(reasons[:-1]) == {None}
            await llm.abort("mine")
            await llm.abort("unknown")
            assert await text_of(llm.generate("abc", GREEDY, "mine")) == alone("abc")  # the late abort hits nothing

    run(main())


def test_an_id_used_again_never_sees_the_old_streams_deltas():
    async def main():
        async with make_llm(step_seconds=0.001) as llm:
            for _ in range(30):
                stream = llm.generate("abc", ENDLESS, "same")
                await anext(stream)
                await stream.aclose()
                assert await text_of(llm.generate("xyz", GREEDY, "same")) == alone("xyz")

    run(main())


def test_an_id_used_again_is_refused_as_itself():
    """The refusal overtakes no delta: it is for the new request, not for the one of that id given up just before."""
    steps = threading.Semaphore(1)

    async def commands(llm: AsyncLLM, count: int) -> None:
        """Until so many have been sent and not taken."""
        while llm._link._commands.qsize() != count:
            await asyncio.sleep(0.001)

    async def main():
        async with make_llm(max_num_seqs=1, max_waiting_requests=1) as llm:
            llm.parts.executor.before_step = lambda output: steps.acquire(timeout=30)
            stream = llm.generate("abc", ENDLESS, "same")
            await anext(stream)  # the second step waits
            waiting = asyncio.create_task(text_of(llm.generate("xyz", GREEDY)))
            await commands(llm, 1)
            steps.release()
            await commands(llm, 0)  # the third step waits, and the queue is full
            await stream.aclose()
            again = asyncio.create_task(text_of(llm.generate("abc", GREEDY, "same")))
            await commands(llm, 2)
            steps.release(1000)
            with pytest.raises(InvalidRequestError) as error:
                await again
            assert error.value.code == "queue_full" and await waiting == alone("xyz")
            await idle(llm)

    run(main())


def test_bad_requests_and_taken_ids_fail_alone():
    async def main():
        async with make_llm(step_seconds=0.001, max_waiting_requests=1, max_num_seqs=1) as llm:
            with pytest.raises(InvalidRequestError):
                await anext(llm.generate("", GREEDY))
            stream = llm.generate("abc", ENDLESS, "mine")
            await anext(stream)
            with pytest.raises(InvalidRequestError, match="in use"):
                await anext(llm.generate("abc", GREEDY, "mine"))
            waiting = asyncio.create_task(text_of(llm.generate("xyz", GREEDY)))
            while not llm.stats().waiting:
                await asyncio.sleep(0.001)
            with pytest.raises(InvalidRequestError) as error:
                await anext(llm.generate("abc", GREEDY))
            assert error.value.code == "queue_full"
            await stream.aclose()
            assert await waiting == alone("xyz")

    run(main())


def test_a_dying_engine_fails_all_waiting_and_all_later_requests_at_once():
    async def main():
        llm = make_llm()

        def die(output):
            if output.step == 5:
                raise RuntimeError("out of memory")

        llm.parts.executor.before_step = die
        results = await asyncio.gather(*(text_of(llm.generate("abc", ENDLESS)) for _ in range(6)), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "out of memory" in str(result) for result in results)
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("abc", GREEDY))
        assert llm.failure is not None
        await llm.close()
        assert llm.parts.executor.closed

    run(main())


def test_closing_fails_what_waits_and_ends_the_thread():
    async def main():
        llm = make_llm(step_seconds=0.001)
        task = asyncio.create_task(text_of(llm.generate("abc", ENDLESS)))
        await asyncio.sleep(0.05)
        await llm.close()
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await task
        assert llm.parts.executor.closed and no_thread_is_left()
        unused = make_llm()
        await unused.close()
        assert unused.parts.executor.closed

    run(main())


def test_an_engine_stays_with_its_event_loop():
    llm = make_llm()
    assert asyncio.run(text_of(llm.generate("abc", GREEDY))) == alone("abc")

    async def other():
        with pytest.raises(EngineDeadError, match="event loop"):
            await anext(llm.generate("abc", GREEDY))
        await llm.close()

    asyncio.run(other())


def test_reset_of_the_prefix_cache():
    async def main():
        async with make_llm() as llm:
            for expected in (0, 4, 4):
                deltas = [delta async for delta in llm.generate("abcdef", GREEDY)]
                assert deltas[0].num_cached_tokens == expected
            await llm.reset_prefix_cache()
            deltas = [delta async for delta in llm.generate("abcdef", GREEDY)]
            assert deltas[0].num_cached_tokens == 0

    run(main())


def test_tokenising_does_not_block_the_event_loop():
    async def main():
        async with make_llm() as llm:
            encode = llm.tokenizer.encode
            llm.tokenizer.encode = lambda text, **kwargs: (time.sleep(0.3), encode(text, **kwargs))[1]
            task = asyncio.create_task(text_of(llm.generate("abc", GREEDY)))
            turns = 0
            while not task.done():
                await asyncio.sleep(0.005)
                turns += 1
            assert turns >= 5

    run(main())
