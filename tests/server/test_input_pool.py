"""Input processes: every job gets an outcome, whatever a job does to its process, and jobs cannot hurt each other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import uvloop

from octavo.config import EngineConfig
from octavo.engine.core_messages import decode_request
from octavo.engine.executor import ExecutorInfo, KVGroup
from octavo.server import input_pool
from octavo.server.input_pool import SHORT_BODY, InputPool
from octavo.server.prepare import Intake, prepare
from octavo.server.prepared import Job, Prepared, Refused, framed
from octavo.server_config import ServerConfig
from octavo.wiring import FrontParts
from tests.engine.fake import FakeTokenizer

INFO = ExecutorInfo((KVGroup(512, 4),), FakeTokenizer.vocab_size, 256, (1,))
#: Far more than anything here takes; a test that waits this long has failed.
HANG = 60.0


def job(content: str = "hi", *, long: bool = False, **fields) -> Job:
    body = json.dumps({"messages": [{"role": "user", "content": content}], "seed": 1, **fields}).encode()
    return Job("chat", body + b" " * (SHORT_BODY if long else 0), "chatcmpl-1", None, 0.0)


def run(test, *, timeout: float = 30.0, factory: str = "fake", info: ExecutorInfo | None = INFO, new_loop=None) -> None:
    """Run `test(pool)` with a started pool, and see that nothing of it is left."""

    async def main() -> None:
        config = ServerConfig(input_timeout=timeout)
        pool = InputPool(EngineConfig(), config, ["model"], factory=f"tests.server.fronts:{factory}")
        await pool.start()
        if info is not None:
            pool.set_info(info)
        pids = set()
        try:
            async with asyncio.timeout(HANG):
                await test(pool)
        finally:
            pids = {lane.pid for lane in (pool.short, pool.long)} - {None}
            await pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("new_loop", [None, uvloop.new_event_loop])
def test_jobs_are_prepared_in_both_lanes_and_nothing_else_gets_onto_the_pipe(new_loop):
    async def test(pool: InputPool) -> None:
        outcomes = await asyncio.gather(*(pool.prepare(job("print", long=i % 2 == 1)) for i in range(20)))
        assert all(isinstance(outcome, Prepared) for outcome in outcomes)
        order = decode_request(outcomes[0].prompts[0].request)
        assert order.prompt_token_ids == FakeTokenizer().encode("uhia") and order.request_id == "chatcmpl-1"
        bad = await pool.prepare(job(temperature="hot"))
        assert isinstance(bad, Refused) and (bad.status, bad.param) == (400, "temperature")
        assert pool.short.started == pool.long.started == 1
        for lane, nice in ((pool.short, 10), (pool.long, 15)):
            assert os.getpriority(os.PRIO_PROCESS, lane.pid) == max(nice, os.getpriority(os.PRIO_PROCESS, 0))

    run(test, new_loop=new_loop)


def test_the_real_model_is_prepared_as_in_process(smollm2_path):
    info = ExecutorInfo((KVGroup(512, 16),), 49152, 8192, (1,))
    config = EngineConfig(model=str(smollm2_path))

    async def main() -> None:
        pool = InputPool(config, ServerConfig(), ["smollm2"])
        await pool.start()
        pool.set_info(info)
        try:
            async with asyncio.timeout(HANG):
                found = await pool.prepare(job("Grüße, 世界 😀"))
        finally:
            await pool.close()
        intake = Intake(FrontParts.load(config).input_processor(info), ("smollm2",), 32, 128, 128)
        assert found == prepare(job("Grüße, 世界 😀"), intake)
        assert found.prompts[0].num_prompt_tokens > 30

    asyncio.run(main())


def test_a_job_past_its_deadline_costs_its_process_and_nobody_else(tmp_path):
    async def test(pool: InputPool) -> None:
        await asyncio.gather(pool.prepare(job()), pool.prepare(job(long=True)))  # both are loaded
        burning = asyncio.create_task(pool.prepare(job("burn")))
        behind = [asyncio.create_task(pool.prepare(job())) for _ in range(5)]
        for _ in range(20):  # the other lane answers all the while
            assert isinstance(await pool.prepare(job(long=True)), Prepared)
        assert not burning.done() and not any(task.done() for task in behind)
        refused = await burning
        assert isinstance(refused, Refused) and (refused.status, refused.code) == (400, "input_timeout") and "2 s" in refused.message
        assert all(isinstance(outcome, Prepared) for outcome in await asyncio.gather(*behind))
        assert (pool.short.started, pool.long.started) == (2, 1)

    run(test, timeout=2.0)


def test_a_process_killed_under_a_job_starts_it_once_more(tmp_path):
    marker = tmp_path / "began"

    async def test(pool: InputPool) -> None:
        sleeping = asyncio.create_task(pool.prepare(job(f"sleep:{marker}")))
        behind = asyncio.create_task(pool.prepare(job()))
        while not marker.exists():
            await asyncio.sleep(0.01)
        os.kill(pool.short.pid, signal.SIGKILL)
        assert isinstance(await sleeping, Prepared) and isinstance(await behind, Prepared)
        assert pool.short.started == 2

    run(test)


def test_a_job_that_kills_every_process_is_given_up():
    async def test(pool: InputPool) -> None:
        deadly = asyncio.create_task(pool.prepare(job("die")))
        behind = asyncio.create_task(pool.prepare(job()))
        refused = await deadly
        assert isinstance(refused, Refused) and (refused.status, refused.code) == (500, "input_crashed")
        assert isinstance(await behind, Prepared)
        assert pool.short.started == 3

    run(test)


def test_a_job_that_fails_is_refused_and_its_process_lives_until_it_is_killed(capfd):
    async def test(pool: InputPool) -> None:
        for word, status, code in (("fail", 500, "internal_error"), ("memory", 400, "input_too_large")):
            refused = await pool.prepare(job(word))
            assert isinstance(refused, Refused) and (refused.status, refused.code) == (status, code)
            assert "secret" not in refused.message
            assert isinstance(await pool.prepare(job()), Prepared)
        assert pool.short.started == 1
        os.kill(pool.short.pid, signal.SIGKILL)  # while it is idle
        assert isinstance(await pool.prepare(job()), Prepared)
        assert pool.short.started == 2

    run(test)
    logged = capfd.readouterr().err
    assert "secret" not in logged and "RuntimeError" in logged


def test_callers_that_leave_take_their_waiting_jobs_with_them():
    async def test(pool: InputPool) -> None:
        burning = asyncio.create_task(pool.prepare(job("burn")))
        waiting = [asyncio.create_task(pool.prepare(job("die"))) for _ in range(3)]
        await asyncio.sleep(0)
        assert pool.short.num_waiting == 4  # the lane has not run yet
        while pool.short.num_waiting == 4:
            await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert pool.short.num_waiting == 0 and pool.short._waiting_bytes == 0
        assert isinstance(await burning, Refused)
        assert isinstance(await pool.prepare(job()), Prepared)
        assert pool.short.started == 2  # none of the deadly ones ever ran

    run(test, timeout=1.0)


def test_a_caller_that_leaves_under_way_does_no_harm(tmp_path):
    marker = tmp_path / "began"

    async def test(pool: InputPool) -> None:
        task = asyncio.create_task(pool.prepare(job(f"sleep:{marker}")))
        while not marker.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert isinstance(await pool.prepare(job()), Prepared)

    run(test, timeout=1.0)


def test_bounds_on_what_waits(monkeypatch):
    monkeypatch.setattr(input_pool, "MAX_WAITING", 3)

    async def test(pool: InputPool) -> None:
        tasks = [asyncio.create_task(pool.prepare(job())) for _ in range(10)]
        outcomes = await asyncio.gather(*tasks)
        refused = [o for o in outcomes if isinstance(o, Refused)]
        assert len(refused) == 7 and {(o.status, o.code) for o in refused} == {(429, "input_queue_full")}
        assert pool.short._waiting_bytes == 0
        pool.long._max_bytes = 3 * SHORT_BODY
        outcomes = await asyncio.gather(*(pool.prepare(job(long=True)) for _ in range(4)))
        assert [isinstance(o, Prepared) for o in outcomes] == [True, True, False, False]

    run(test)


def test_before_the_engine_is_ready_and_after_it_came_back_different():
    async def test(pool: InputPool) -> None:
        refused = await pool.prepare(job())
        assert isinstance(refused, Refused) and (refused.status, refused.code) == (503, "model_loading")
        pool.set_info(INFO)
        assert isinstance(await pool.prepare(job()), Prepared)
        pool.set_info(ExecutorInfo((KVGroup(512, 4),), FakeTokenizer.vocab_size, 3, (1,)))
        refused = await pool.prepare(job())
        assert isinstance(refused, Refused) and refused.code == "context_length_exceeded"
        assert pool.short.started == 1

    run(test, info=None)


@pytest.mark.parametrize("factory, reason", [("unloadable", "there is no such model"), ("crashing", "an input process died")])
def test_what_cannot_be_loaded_is_said_to_every_job(factory, reason):
    async def test(pool: InputPool) -> None:
        for _ in range(3):
            refused = await pool.prepare(job())
            assert isinstance(refused, Refused) and (refused.status, refused.code) == (503, "input_unavailable")
            assert reason in refused.message
        assert pool.short.started < 3  # a pause between tries

    run(test, factory=factory)


def test_closing_refuses_what_waits(tmp_path):
    marker = tmp_path / "began"

    async def test(pool: InputPool) -> None:
        tasks = [asyncio.create_task(pool.prepare(job(f"sleep:{marker}"))), asyncio.create_task(pool.prepare(job()))]
        while not marker.exists():
            await asyncio.sleep(0.01)
        await pool.close()
        for outcome in [*await asyncio.gather(*tasks), await pool.prepare(job())]:
            assert isinstance(outcome, Refused) and (outcome.status, outcome.code) == (503, "shutting_down")

    run(test)


def test_no_key_reaches_an_input_process(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-marker")
    monkeypatch.setenv("OCTAVO_API_KEY_FILE", "sk-marker-file")
    pool = InputPool(EngineConfig(), ServerConfig(api_key=["sk-marker"], api_key_file="sk-marker-file"), ["model"])
    assert b"sk-marker" not in framed(pool.short._start)
    assert not any("sk-marker" in value for value in pool.short._environment.values())


@pytest.mark.parametrize("word", ["hi", "burn"])
def test_input_processes_die_with_their_parent(word):
    """Idle ones see the end of their input; busy ones have an alarm."""
    program = f"""
        import asyncio
        from octavo.config import EngineConfig
        from octavo.server.input_pool import InputPool
        from octavo.server_config import ServerConfig
        from tests.server.test_input_pool import INFO, job

        async def main():
            pool = InputPool(EngineConfig(), ServerConfig(input_timeout=0.5), ["model"], factory="tests.server.fronts:fake")
            await pool.start()
            pool.set_info(INFO)
            await pool.prepare(job())
            task = asyncio.create_task(pool.prepare(job({word!r})))
            await asyncio.sleep(0.1)
            print(pool.short.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=environment) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + HANG
    while _runs(pid):
        assert time.monotonic() < until, "it outlived its parent"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
