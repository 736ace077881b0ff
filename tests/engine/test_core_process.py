"""A core in a real process, with a fake model: the same answers as anywhere, and whatever becomes of the process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, Submission
from octavo.engine.core_messages import AddRequests, encode_request
from octavo.engine.process_core import Backoff, ProcessCore
from octavo.engine.request import EngineRequest
from octavo.engine.thread_core import ThreadCore
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from octavo.llm import LLM
from octavo.outputs import CompletionDelta
from octavo.sampling_params import SamplingParams
from tests.engine import fake_parts
from tests.engine.fake import Collector, FakeTokenizer, reference_tokens, request

FACTORY = "tests.engine.fake_parts:make"
FAST = Backoff(first=0.05, most=0.4)
#: Nothing here takes so long; it only turns a hang into a failure.
LIMIT = 60


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, LIMIT))


def make_core(model: str = "fake", *, config: dict | None = None, **settings) -> ProcessCore:
    settings = {"backoff": FAST, "parts_factory": FACTORY, **settings}
    return ProcessCore(EngineConfig(model=model, **(config or {})), **settings)


@asynccontextmanager
async def engine_of(core: ProcessCore) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(core) as engine:
        await engine.wait_ready()
        yield engine


def submission(order: EngineRequest) -> Submission:
    return Submission(order.request_id, order.sampling_params.n, order)


def endless(request_id: str, **fields) -> EngineRequest:
    return request(request_id, [5, 6, 7], **{"max_tokens": 200, "eos": False, "ignore_eos": True, **fields})


async def read(engine: AsyncEngine, *orders: EngineRequest) -> Collector:
    collector = Collector()
    for order in orders:
        collector.expect(order)
    async for batch in engine.stream([submission(order) for order in orders]):
        assert batch
        collector.add(batch)
    return collector


async def check(engine: AsyncEngine, *orders: EngineRequest) -> None:
    """Each gives what the definition of the fake model says."""
    collector = await read(engine, *orders)
    for order in orders:
        for choice in range(order.sampling_params.n):
            assert collector.tokens(order.request_id, choice) == reference_tokens(order, choice)


async def started(engine: AsyncEngine, order: EngineRequest):
    """A stream that has given its first deltas."""
    stream = engine.stream([submission(order)])
    await anext(stream)
    return stream


async def until(condition, what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited in vain: {what}")


async def at_rest(engine: AsyncEngine) -> None:
    def resting() -> bool:
        stats = engine.stats()
        return stats.running == stats.waiting == stats.holding == stats.blocks_used == 0 and not engine._routes

    await until(resting, f"rest, {engine.stats()}")


def exists(pid: int) -> bool:
    """Also as a zombie."""
    return Path(f"/proc/{pid}").exists()


def open_files(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, for example the one that lists this directory
            found.add(os.readlink(link))
    return found


def folders(pid: int) -> list[Path]:
    """Directories of the unix sockets a process listens on."""
    own = open_files(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [Path(line[7]).parent for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in own and "octavo-" in line[7]]


def octavo_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("octavo")]


# Answers


def test_a_thread_and_a_process_give_the_answers_of_the_definition():
    orders = [
        request("greedy", [5, 6, 7], max_tokens=30),
        request("seeded", [5, 6, 7], max_tokens=30, temperature=1.0, seed=2**64 - 1),
        request("many", [9, 8, 9, 8, 9], max_tokens=12, n=4, temperature=0.8, seed=3),
        request("salted", list(range(5, 25)), max_tokens=5, cache_salt="key", logprobs=2, priority=-1),
        request("stopped", [11, 12], max_tokens=60, stop_token_ids=[5, 6, 7, 8, 9]),
    ]

    async def texts(link) -> dict[str, list[tuple]]:
        async with AsyncEngine(link) as engine:
            await engine.wait_ready()
            collector = await read(engine, *orders)
            for order in orders:
                for choice in range(order.sampling_params.n):
                    assert collector.tokens(order.request_id, choice) == reference_tokens(order, choice)
            await at_rest(engine)
            return {
                name: [(c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]
                for name, output in collector.outputs.items()
            }

    async def main():
        config = EngineConfig(model="fake")
        thread = await texts(ThreadCore(fake_parts.make(config, lambda *_: None).core()))
        assert await texts(make_core()) == thread

    run(main())


def test_the_real_model_gives_the_same_text_in_process_and_out_of_it(smollm2_path):
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=12, n=2, logprobs=1)
    with LLM(str(smollm2_path), kv_cache_memory="64MiB") as llm:
        whole = llm.generate("Deep learning is", params)[0]
        order = llm._inputs.process("mine", "Deep learning is", params)

    async def main():
        core = ProcessCore(EngineConfig(model=str(smollm2_path), kv_cache_memory="64MiB"))
        async with engine_of(core) as engine:
            assert engine.info is not None and engine.info.vocab_size > 40_000 and engine.backend
            outputs = (await read(engine, order)).outputs["mine"].outputs
            assert [(c.text, c.token_ids, c.logprobs) for c in outputs] == [(c.text, c.token_ids, c.logprobs) for c in whole.outputs]
            assert len(outputs[0].token_ids) == 12 and outputs[0].text

    run(main())


def test_five_hundred_streams_and_nothing_lost():
    async def main():
        async with engine_of(make_core(config={"max_waiting_requests": 1000})) as engine:
            orders = [request(f"r{i}", [5 + i % 20, 5 + i // 20], max_tokens=3 + i % 5, temperature=1.0, seed=i) for i in range(500)]
            await asyncio.gather(*(check(engine, order) for order in orders))
            await at_rest(engine)
            stats = engine.stats()
            assert stats.requests_finished == 500 and stats.requests_aborted == 0
            assert sum(size * steps for size, steps in stats.batch_sizes.items()) >= stats.tokens_sampled
            assert sum(stats.batch_sizes.values()) == stats.steps and max(stats.decode_batch_sizes) > 8

    run(main())


def test_a_slow_reader_gets_everything_in_few_batches():
    async def main():
        async with engine_of(make_core()) as engine:
            order = endless("slow")
            collector, batches = Collector(), 0
            collector.expect(order)
            async for batch in engine.stream([submission(order)]):
                collector.add(batch)
                batches += 1
                if batches == 1:
                    await until(lambda: not engine._routes, "the end of a stream that nobody reads")
            assert collector.tokens("slow") == reference_tokens(order) and batches == 2

    run(main())


def test_encoded_requests_are_passed_on_as_they_are():
    async def main():
        async with engine_of(make_core()) as engine:
            order = request("mine", [5, 6, 7])
            for encoded in (encode_request(order), msgspec.Raw(encode_request(order))):
                tokens = [t async for batch in engine.stream([Submission("mine", 1, encoded)]) for d in batch for t in d.token_ids]
                assert tokens == reference_tokens(order)

    run(main())


def test_events_reset_and_figures():
    async def main():
        async with engine_of(make_core()) as engine:
            assert engine.stats().blocks_total == fake_parts.NUM_BLOCKS and await engine.events() == []
            for expected in (0, 8, 8):
                collector = await read(engine, request("r", list(range(5, 15))))
                assert collector.deltas[0].num_cached_tokens == expected
            await engine.reset_prefix_cache()
            assert (await read(engine, request("r", list(range(5, 15))))).deltas[0].num_cached_tokens == 0
            events = await engine.events()
            assert [event.step for event in events] == list(range(1, engine.stats().steps + 1))
            assert await engine.events(2) == events[-2:] and events[0].entries[0].request_id == "r"
            assert engine.stats().execute_seconds > 0

    run(main())


# Readers that leave


def test_a_closed_or_cancelled_reader_aborts_its_request():
    async def main():
        async with engine_of(make_core("fake,delay=0.002", config={"max_num_seqs": 2})) as engine:
            running = await started(engine, endless("running", n=2))
            waiting = asyncio.create_task(read(engine, endless("waiting")))
            await until(lambda: engine.stats().requests_added == 2 and engine.stats().waiting == 1, "a request in the queue")
            waiting.cancel()
            await running.aclose()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await at_rest(engine)
            assert engine.stats().requests_aborted == 2 and engine.stats().requests_finished == 2

    run(main())


def test_a_hundred_rounds_of_hanging_up():  # A10
    async def main():
        async with engine_of(make_core("fake,delay=0.0005", config={"max_num_seqs": 4})) as engine:
            for round_ in range(100):
                staying = [asyncio.create_task(check(engine, request(f"stay{i}", [8 + i, round_ % 20 + 5]))) for i in range(2)]
                leaving = [await started(engine, endless(f"leave{i}")) for i in range(2)]
                await asyncio.gather(*(stream.aclose() for stream in leaving))
                await check(engine, request("leave0", [9, 9, round_ % 20 + 5]))  # the id of one that has just left
                await asyncio.gather(*staying)
            await at_rest(engine)
            assert engine.stats().requests_aborted == 200 and engine.is_healthy()

    run(main())


def test_aborts_are_silent_and_a_finish_seen_first_wins():  # A12
    async def main():
        async with engine_of(make_core("fake,delay=0.001")) as engine:
            reasons = []
            async for batch in engine.stream([submission(endless("mine"))]):
                reasons += [delta.finish_reason for delta in batch]
                for name in ("mine", "mine", "unknown"):
                    await engine.abort(name)
            assert reasons[-1] == "abort" and set(reasons[:-1]) <= {None}
            await engine.abort("mine")
            await check(engine, request("mine", [5, 6, 7]))
            for _ in range(30):  # an abort that meets the last step
                collector = Collector()
                order = request("mine", [5, 6], max_tokens=3, eos=False)
                collector.expect(order)
                async for batch in engine.stream([submission(order)]):
                    collector.add(batch)
                    await engine.abort("mine")
                assert collector.outputs["mine"].outputs[0].finish_reason in ("abort", "length")
            await at_rest(engine)

    run(main())


# Requests that are refused


def test_a_full_queue_refuses_and_the_others_go_on():
    async def main():
        config = {"max_num_seqs": 1, "max_waiting_requests": 1}
        async with engine_of(make_core("fake,delay=0.002", config=config)) as engine:
            running = await started(engine, endless("running"))
            waiting = asyncio.create_task(check(engine, request("waiting", [5, 6])))
            await until(lambda: engine.stats().waiting == 1, "a request in the queue")
            with pytest.raises(InvalidRequestError) as error:
                await read(engine, request("third", [7]))
            assert error.value.code == "queue_full"
            await running.aclose()
            await waiting
            await check(engine, request("third", [7]))
            await at_rest(engine)

    run(main())


def test_several_prompts_run_all_or_none():
    async def main():
        async with engine_of(make_core(config={"max_waiting_requests": 3})) as engine:
            orders = [endless(f"r{i}") for i in range(4)]
            with pytest.raises(InvalidRequestError) as error:
                await read(engine, *orders)
            assert error.value.code == "queue_full"
            await at_rest(engine)
            assert engine.stats().tokens_sampled == 0
            await check(engine, *orders[:3])
            await at_rest(engine)

    run(main())


def test_an_id_is_used_once_at_a_time():
    async def main():
        async with engine_of(make_core("fake,delay=0.001")) as engine:
            stream = await started(engine, endless("mine"))
            for orders in ([endless("mine")], [endless("twice"), endless("twice")]):
                with pytest.raises(InvalidRequestError) as error:
                    await read(engine, *orders)
                assert error.value.code == "duplicate_request_id"
            for _ in range(20):
                await stream.aclose()
                await check(engine, request("mine", [9, 9, 9]))
                stream = await started(engine, endless("mine"))
            await stream.aclose()

    run(main())


HOSTILE = {
    "no bytes": b"",
    "no message": b"\xc1\xff\x00",
    "half": encode_request(endless("bad"))[:-3],
    "another type": msgspec.msgpack.encode([1, 2, 3]),
    "another id": encode_request(endless("other")),
    "no prompt": encode_request(request("bad", [])),
    "a token too high": encode_request(request("bad", [5, FakeTokenizer.vocab_size])),
    "a token below 0": encode_request(request("bad", [-1])),
    "a prompt too long": encode_request(request("bad", [5] * 257)),
    "a bias for no token": encode_request(request("bad", [5], logit_bias={99: 1.0})),
    "parameters left open": msgspec.msgpack.encode(
        {"request_id": "bad", "prompt_token_ids": [5], "sampling_params": {}, "max_tokens": 5, "seed": 1}
    ),
    "a seed below 0": encode_request(request("bad", [5], seed=-1)),
    "impossible parameters": msgspec.msgpack.encode(
        {"request_id": "bad", "prompt_token_ids": [5], "sampling_params": {"n": 10**6}, "max_tokens": 5, "seed": 1}
    ),
}


def test_hostile_requests_are_refused_and_the_others_go_on():
    async def main():
        async with engine_of(make_core("fake,delay=0.001")) as engine:
            bystander = asyncio.create_task(check(engine, endless("bystander")))
            for what, data in HOSTILE.items():
                with pytest.raises(InvalidRequestError):
                    async for _ in engine.stream([submission(request("good", [5])), Submission("bad", 1, data)]):
                        raise AssertionError(f"{what} runs")
            await bystander
            await at_rest(engine)
            assert engine.restarts == 0

    run(main())


def test_hostile_bytes_on_the_socket_do_not_kill_the_core(capfd):
    async def main():
        core = make_core("fake,delay=0.001")
        async with engine_of(core) as engine:
            bystander = asyncio.create_task(check(engine, endless("bystander")))
            for data in (b"", b"\x00", b"\xc1" * 1000, b"\xdf\xff\xff\xff\xff", b"\x81\xa4type\xa5close"[:-1], os.urandom(5000)):
                core._outbox.append((0, data))
                core._wake.set()
            await check(engine, request("r", [5, 6]))
            await bystander
            await at_rest(engine)
            assert engine.restarts == 0 and engine.is_healthy()

    run(main())
    assert capfd.readouterr().err.count("no command") == 6


# A core that is lost


async def outcome(engine: AsyncEngine, order: EngineRequest) -> tuple[Exception | None, float]:
    """The error a stream ends with, and when."""
    try:
        await read(engine, order)
    except Exception as error:
        return error, time.monotonic()
    return None, time.monotonic()


def test_kill_9_fails_all_streams_at_once_and_service_resumes():
    async def main():
        core = make_core("fake,delay=0.005", backoff=Backoff(first=0.3))
        async with engine_of(core) as engine:
            for losses in (1, 2):
                tasks = [asyncio.create_task(outcome(engine, endless(f"r{i}"))) for i in range(20)]
                await until(lambda: engine.stats().running == 20, "twenty running streams")
                pid, killed = core.pid, time.monotonic()
                os.kill(pid, signal.SIGKILL)
                for error, when in await asyncio.gather(*tasks):
                    assert isinstance(error, EngineDeadError) and "being restarted" in str(error)
                    assert when - killed < 1.0
                assert engine.state == "restarting" and engine.restarts == losses and not engine.is_healthy()
                assert "signal 9" in engine.failure
                with pytest.raises(EngineDeadError, match="being restarted"):
                    await read(engine, request("r0", [5]))
                with pytest.raises(EngineDeadError):
                    await engine.events()
                await engine.abort("r0")
                await engine.wait_ready()
                assert engine.state == "ready" and engine.failure is None and engine.is_healthy()
                assert core.pid != pid and not exists(pid)
                await check(engine, *(request(f"r{i}", [5, 6 + i % 20]) for i in range(20)))  # the same ids
                assert engine.stats().requests_added == 20  # nothing of the lost core's

    run(main())


@pytest.mark.parametrize(("fault", "failure"), [("raise", "RuntimeError: the fake is broken"), ("exit", "status 3"), ("kill", "signal 9")])
def test_a_fault_in_a_step_costs_what_runs_and_no_more(fault, failure):
    async def main():
        async with engine_of(make_core("fake,delay=0.002")) as engine:
            victim = asyncio.create_task(outcome(engine, endless("victim")))
            await until(lambda: engine.stats().running, "a running stream")
            error, _ = await outcome(engine, endless(f"{fault}-1"))
            assert isinstance(error, EngineDeadError) and failure not in str(error)  # details are for the operator
            assert isinstance((await victim)[0], EngineDeadError)
            assert failure in engine.failure
            await engine.wait_ready()
            await check(engine, request("r", [5, 6, 7]))
            assert engine.restarts == 1

    run(main())


def test_a_step_that_hangs_trips_the_watchdog():  # E17
    async def main():
        core = make_core("fake,delay=0.002", step_timeout=1.0)
        async with engine_of(core) as engine:
            await asyncio.sleep(1.2)  # nothing to do is no hang
            assert engine.is_healthy() and engine.restarts == 0
            victim = asyncio.create_task(outcome(engine, endless("victim", max_tokens=250)))
            await until(lambda: engine.stats().running, "a running stream")
            pid = core.pid
            hanging = asyncio.create_task(outcome(engine, endless("hang-1")))
            await until(lambda: not engine.is_healthy(), "red health")
            assert engine.state == "ready", "health must turn red before the core is killed"
            for task in (victim, hanging):
                assert isinstance((await task)[0], EngineDeadError)
            assert re.search(r"hangs: .* 1 running|hangs: .* 2 running", engine.failure)
            await engine.wait_ready()
            assert not exists(pid) and engine.is_healthy()
            await check(engine, request("r", [5, 6, 7]))

    run(main())


def test_a_stopped_core_trips_the_watchdog_by_any_unanswered_command():
    async def main():
        core = make_core(step_timeout=0.5)
        async with engine_of(core) as engine:
            os.kill(core.pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError):
                await engine.events()
            await engine.wait_ready()
            assert engine.restarts == 1 and await engine.events() == []

    run(main())


def test_what_was_meant_for_a_lost_core_does_not_reach_the_next():
    async def main():
        core = make_core()
        async with engine_of(core) as engine:
            os.kill(core.pid, signal.SIGKILL)
            await until(lambda: engine.restarts == 1, "the loss")
            await engine.wait_ready()
            core.send(AddRequests({"late": encode_request(endless("late"))}), generation=0)
            await check(engine, request("late", [5, 6]))
            assert engine.stats().requests_added == 1

    run(main())


def waits_after_losses(caplog, backoff: Backoff) -> list[str]:
    async def main():
        core = make_core(backoff=backoff)
        async with engine_of(core) as engine:
            for losses in range(1, 5):
                os.kill(core.pid, signal.SIGKILL)
                await until(lambda losses=losses: engine.restarts == losses, "the loss")
                await engine.wait_ready()

    run(main())
    return re.findall(r"starts in ([\d.]+) s", caplog.text)


def test_waits_double_up_to_the_most(caplog):
    assert waits_after_losses(caplog, Backoff(first=0.1, most=0.3)) == ["0.1", "0.2", "0.3", "0.3"]
    assert [Backoff().seconds(losses) for losses in (1, 2, 3, 4, 7, 1000)] == [0.5, 1, 2, 4, 30, 30]


def test_waits_begin_anew_after_a_healthy_core(caplog):
    assert waits_after_losses(caplog, Backoff(first=0.1, most=0.3, healthy=0.0)) == ["0.1"] * 4


# A core that does not load


@pytest.mark.parametrize(("load", "error", "message"), [("model", ModelLoadError, "damaged: fetch"), ("config", ConfigError, "too small")])
def test_a_model_that_cannot_be_loaded_is_not_tried_again(load, error, message):
    async def main():
        async with AsyncEngine(make_core(f"fake,load={load}")) as engine:
            for _ in range(2):
                with pytest.raises(error, match=message):
                    await engine.wait_ready()
            with pytest.raises(EngineDeadError, match=message):
                await read(engine, request("r", [5]))
            assert engine.state == "closed" and message.split(":")[0] in engine.failure
            assert engine.restarts == 0 and engine.info is None and not engine.is_healthy()
            await until(lambda: not octavo_threads(), "the supervisor's end")

    run(main())


@pytest.mark.parametrize(("load", "failure"), [("bug", "KeyError"), ("exit", "status 4")])
def test_a_core_that_never_gets_ready_is_given_up_after_some_attempts(load, failure):
    async def main():
        async with AsyncEngine(make_core(f"fake,load={load}", backoff=Backoff(first=0.05, attempts=2))) as engine:
            with pytest.raises(EngineDeadError, match=failure):
                await engine.wait_ready()
            assert engine.restarts == 1 and engine.state == "closed"

    run(main())


def test_a_model_that_goes_away_may_come_back(tmp_path):
    async def main():
        core = make_core(f"fake,broken_if={tmp_path / 'gone'}")
        async with engine_of(core) as engine:
            (tmp_path / "gone").touch()
            os.kill(core.pid, signal.SIGKILL)
            await until(lambda: engine.restarts >= 3, "attempts in vain")
            assert "damaged" in engine.failure and engine.state == "restarting"
            (tmp_path / "gone").unlink()
            await engine.wait_ready()
            await check(engine, request("r", [5, 6]))

    run(main())


def test_nothing_runs_before_the_model_is_loaded():
    async def main():
        core = make_core("fake,load=slow")
        async with AsyncEngine(core) as engine:
            await until(lambda: engine.loading is not None and engine.loading.done == 100, "progress")
            assert engine.state == "loading" and engine.info is None and not engine.is_healthy()
            with pytest.raises(EngineDeadError, match="loading"):
                await read(engine, request("r", [5]))
            ready = asyncio.create_task(engine.wait_ready())
            pid = core.pid
            await asyncio.sleep(0)
            await engine.close()  # at once, although the child hears nothing
            assert not exists(pid)
            with pytest.raises(EngineDeadError, match="closed"):
                await ready

    run(main())


# The process


def test_it_listens_on_a_private_unix_socket_only_and_ignores_the_terminals_signals():  # G15
    async def main():
        core = make_core()
        async with engine_of(core) as engine:
            own = open_files(core.pid)
            for table in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path(f"/proc/{core.pid}/net/{table}").read_text().splitlines()[1:]:
                    assert f"socket:[{line.split()[9]}]" not in own, f"the core has a {table} socket"
            (folder,) = set(folders(os.getpid()))
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
            arguments = Path(f"/proc/{core.pid}/cmdline").read_bytes().split(b"\0")[1:-1]
            assert arguments == [b"-P", b"-m", b"octavo.core_process"]
            os.kill(core.pid, signal.SIGINT)
            os.kill(core.pid, signal.SIGTERM)
            await check(engine, request("r", [5, 6, 7]))
            assert engine.restarts == 0
        assert not folder.exists()

    run(main())


@pytest.mark.parametrize("model", ["fake", "fake,delay=0.001"])
def test_closing_leaves_nothing_behind(model):
    async def main():
        core = make_core(model)
        async with engine_of(core) as engine:
            pid, (folder,) = core.pid, set(folders(os.getpid()))
            task = asyncio.create_task(outcome(engine, endless("r")))
            await until(lambda: engine._routes, "a request")
            await engine.close()
            await engine.close()
            assert isinstance((await task)[0], EngineDeadError)
            with pytest.raises(EngineDeadError, match="closed"):
                await engine.wait_ready()
        assert not exists(pid) and not folder.exists() and not octavo_threads()
        assert core.pid is None and engine.state == "closed" and engine.restarts == 0

    run(main())


def test_closing_ends_a_core_that_hangs_and_one_that_never_began():
    async def main():
        core = make_core(close_timeout=0.2)
        async with engine_of(core) as engine:
            task = asyncio.create_task(outcome(engine, endless("hang-1")))
            await until(lambda: engine._routes, "a request")
            pid = core.pid
        assert not exists(pid) and isinstance((await task)[0], EngineDeadError)
        await AsyncEngine(make_core()).close()
        assert not octavo_threads()

    run(main())


def test_cores_run_at_the_niceness_of_the_moment_the_link_was_made():
    """Niceness belongs to a thread: this one takes its own with it."""
    found = []

    async def main():
        core = make_core()
        before = os.getpriority(os.PRIO_PROCESS, 0)
        os.nice(3)
        async with engine_of(core) as engine:
            found.append(os.getpriority(os.PRIO_PROCESS, core.pid) - before)
            os.kill(core.pid, signal.SIGKILL)
            await until(lambda: engine.restarts == 1, "the loss")
            await engine.wait_ready()
            found.append(os.getpriority(os.PRIO_PROCESS, core.pid) - before)
            found.append(os.getpriority(os.PRIO_PROCESS, 0) - before)

    thread = threading.Thread(target=run, args=(main(),))
    thread.start()
    thread.join()
    assert found == [0, 0, 3]


PARENT = """
    import asyncio, sys
    from octavo.config import EngineConfig
    from octavo.engine.async_engine import AsyncEngine, Submission
    from octavo.engine.process_core import ProcessCore
    from tests.engine.fake import request

    async def main():
        core = ProcessCore(EngineConfig(model="fake"), parts_factory="tests.engine.fake_parts:make")
        engine = AsyncEngine(core)
        await engine.wait_ready()
        print(core.pid, flush=True)
        async for _ in engine.stream([Submission(sys.argv[1], 1, request(sys.argv[1], [5, 6], max_tokens=200))]):
            pass
        print("done", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("request_id", ["idle", "hang-1"])
def test_a_core_does_not_outlive_its_parent(request_id):
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), request_id],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as parent:
        pid = int(parent.stdout.readline())
        (folder,) = set(folders(parent.pid))
        if request_id == "idle":
            assert parent.stdout.readline() == "done\n"
        else:
            time.sleep(0.3)
        assert exists(pid) and folder.exists()
        parent.kill()
        parent.wait()

        def gone() -> bool:
            try:
                return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"  # nobody may reap it here
            except OSError:
                return True

        run(until(gone, "the end of the core"))
        assert not folder.exists()


def test_deltas_have_all_their_fields():
    """What a process sends is what a thread would hand over, but for times and seeds drawn at random."""

    async def main():
        async with engine_of(make_core()) as engine:
            collector = await read(engine, request("r", [5, 6, 7], prompt_logprobs=1, logprobs=1))
            first, last = collector.deltas[0], collector.deltas[-1]
            assert isinstance(first, CompletionDelta) and first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == 3
            assert last.metrics.first_token <= last.metrics.last_token <= time.perf_counter()  # one clock for both processes
            assert first.num_prompt_tokens == 3 and first.seed == 7

    run(main())
