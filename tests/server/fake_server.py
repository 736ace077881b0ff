"""The real application on a real socket, over the fake model of tests/engine/fake.py, in threads of the test's process.

Everything of the HTTP side is the real thing; a script decides what the model says and a gate when it may go on. Input
processes are replaced by the same function in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.input_processor import InputProcessor
from octavo.engine.thread_core import ThreadCore
from octavo.server.app import build_app
from octavo.server.auth import Keys
from octavo.server.http_protocol import HttpProtocol
from octavo.server.prepare import Intake, prepare
from octavo.server.prepared import Job, Outcome
from octavo.server.state import ServerState
from octavo.server_config import ServerConfig
from octavo.tokenizer.messages import checked, joined
from tests.engine.fake import EOS, FakeExecutor, FakeTemplate, FakeTokenizer, make_core

PATIENCE = 30.0
MODEL = "org/fake"


def alphabet(prompt: list[int], count: int) -> int:
    """A model that says the alphabet, for ever."""
    return 5 + count % 26


def alphabet_once(prompt: list[int], count: int) -> int:
    return 5 + count if count < 26 else EOS


class AnyTokenizer(FakeTokenizer):
    """Takes any text: what the fake has no token for is an "x"."""

    def encode(self, text: str, **options: bool) -> list[int]:
        known = "".join(letter if letter in " \n\U0001f600" or "a" <= letter <= "z" else "x" for letter in text)
        return super().encode(known, **options)


class AnyTemplate(FakeTemplate):
    def encode_chat(self, messages, /, **kwargs):
        text = "".join(message["role"][0] + joined(message["content"]) for message in checked(messages))
        return AnyTokenizer().encode(text)


class InlineInputs:
    """What InputPool is, without processes. `hold`: nothing gets through while it is set."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.hold = threading.Event()
        self.inside = 0
        self.seen: list[Job] = []

    async def prepare(self, job: Job) -> Outcome:
        self.seen.append(job)
        self.inside += 1
        try:
            while self.hold.is_set():
                await asyncio.sleep(0.005)
            return prepare(job, self._intake)
        finally:
            self.inside -= 1

    async def close(self) -> None:
        pass


class FakeServer:
    def __init__(self, config: ServerConfig, script: Any, **settings: Any) -> None:
        sizes = {"num_blocks": 512, "max_model_len": 256}
        self.executor = FakeExecutor(script=script, **{name: settings.pop(name, size) for name, size in sizes.items()})
        #: The model computes only while this is set.
        self.gate = threading.Event()
        self.gate.set()
        self.executor.before_step = lambda output: self.gate.wait(PATIENCE)
        self.core = make_core(self.executor, **settings)
        self.config = config
        self.port = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE)
        self.url = f"http://127.0.0.1:{self.port}"

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        processor = InputProcessor(AnyTokenizer(), AnyTemplate(), self.executor.info, frozenset({EOS}), {}, EngineConfig())
        config = self.config
        self.inputs = InlineInputs(Intake(processor, (MODEL,), config.max_json_depth, config.max_prompts, config.max_choices))
        self.engine = AsyncEngine(ThreadCore(self.core))
        self.state = ServerState(config, (MODEL,), Keys(config.api_key), self.engine, self.inputs)
        self.state.inputs_loaded = True
        self.app = build_app(self.state)
        http = uvicorn.Server(
            uvicorn.Config(
                self.app, port=0, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, date_header=False, proxy_headers=False,
            )
        )  # fmt: skip
        http.capture_signals = _no_signals
        self.http = http
        async with self.engine:
            await self.engine.wait_ready()
            serving = asyncio.create_task(http.serve())
            while not http.started:
                await asyncio.sleep(0.005)
            self.port = http.servers[0].sockets[0].getsockname()[1]
            self._started.set()
            await serving

    def call(self, function: Any) -> Any:
        """Run in the server's event loop."""

        async def inside() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(PATIENCE)

    def client(self, **kwargs: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=False, **kwargs)

    def is_idle(self) -> bool:
        """Nothing of any request is left anywhere."""
        stats = self.core.stats
        in_core = stats.running + stats.waiting + stats.holding + stats.blocks_used
        return in_core == 0 and self.inputs.inside == 0 and not self.http.server_state.tasks and not self.core.has_unfinished_requests()

    def metrics_of(self, name: str, **labels: str) -> float:
        """One sample; 0 if there is none."""
        return self.state.metrics.registry.get_sample_value(name, {"model": MODEL, **labels}) or 0.0

    def end(self) -> None:
        self.gate.set()
        self.inputs.hold.clear()
        self.http.should_exit = self.http.force_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server does not end"


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


@contextmanager
def fake_server(script: Any = alphabet_once, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[FakeServer]:
    """`engine`: settings of the fake engine; the rest are settings of ServerConfig."""
    server = FakeServer(ServerConfig(**settings), script, **(engine or {}))
    try:
        yield server
    finally:
        server.end()


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
