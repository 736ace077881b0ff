"""An engine and its process: what a forked child may do with it, and what it costs at rest. Real processes, a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")

COMMON = """
import asyncio, os, signal, sys, time
from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import EngineDeadError
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
settings = dict(kv_cache_memory="8MiB")
"""
FORKED_LLM = """
llm = LLM(sys.argv[1], **settings)
ids = lambda: llm.generate(["hello", "sea"], params)[0].outputs[0].token_ids
before = ids()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    os._exit(0 if ids() == before else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ids() == before)
"""
FORKED_ASYNC = """
async def ask(llm):
    return [delta async for delta in llm.generate("hello", params)]

async def main():
    llm = AsyncLLM(sys.argv[1], **settings)
    first = await ask(llm)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            asyncio.run(ask(llm))
        except EngineDeadError as error:
            print(error, flush=True)
            os._exit(0)
        finally:
            os._exit(3)  # without the ends of loops and threads that are not here
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(code, len(await ask(llm)) == len(first))
    await llm.close()

asyncio.run(main())
"""
IDLE = """
async def main():
    llm, other = AsyncLLM(sys.argv[1], **settings), LLM(sys.argv[1], **settings)
    other.generate("hello", params)
    [delta async for delta in llm.generate("hello", params)]
    await asyncio.sleep(0.2)
    before = time.process_time()
    await asyncio.sleep(1)
    print(time.process_time() - before)
    await llm.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("m"), fmt="gguf", seed=3, quant="Q8_0")


def run(code: str, model: Path) -> str:
    paths = os.pathsep.join([str(Path(p)) for p in sys.path if p])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, str(model)], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_generates_the_same(tiny):
    assert run(FORKED_LLM, tiny.path).split() == ["0", "True"]


def test_a_forked_child_cannot_use_an_engine_whose_thread_is_not_there(tiny):
    """asyncio has no running loop after a fork; a new one is not the engine's, which says so instead of waiting for ever."""
    out = run(FORKED_ASYNC, tiny.path).splitlines()
    assert "make one per loop" in out[0] and out[-1].split() == ["0", "True"]


def test_engines_at_rest_take_no_processor_time(tiny):
    assert float(run(IDLE, tiny.path)) < 0.1
