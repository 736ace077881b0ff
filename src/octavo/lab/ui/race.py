"""The race: the same prompt and the same greedy tokens by several ways of decoding, one after the other, timed token by token.

Owner of a run's lanes; a lane is filled by a thread of its own while the page looks on, so that drawing waits for nobody.
Not here: the ways themselves (octavo.lab.standard.decoding), drawing (race_tab.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.lab.standard import decoding
from octavo.lab.standard.model import LabModel

#: Tokens of KV that fit, prompt and answer together.
POOL_BLOCKS = 64
Decode = Callable[[Any, list[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding. Without `decode` it is the whole engine, streaming."""

    name: str
    note: str
    backend: str = "cpu"
    decode: Decode | None = None


WAYS = {
    "naive": Way("Naive", "native kernels; every token computes the whole text again", "cpu", decoding.naive),
    "numpy": Way("KV cache, NumPy", "each token computes one row, in plain NumPy", "reference", decoding.kv_cache),
    "native": Way("KV cache, native", "the same loop on the native kernels", "cpu", decoding.kv_cache),
    "engine": Way("Engine, streaming", "scheduler, paged blocks, sampler and text, as a server runs it"),
    "naive_numpy": Way("Naive, NumPy", "both handicaps at once; takes minutes for long answers", "reference", decoding.naive),
}


@dataclass(slots=True)
class Lane:
    key: str
    #: Seconds since the start, one for each token.
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    state: str = "waiting"
    error: str = ""

    @property
    def way(self) -> Way:
        return WAYS[self.key]

    @property
    def total(self) -> float:
        return self.times[-1] if self.times else 0.0

    def token_times(self) -> list[float]:
        """Seconds of each token: the first one's include the prompt."""
        return [now - before for before, now in zip([0.0, *self.times], self.times, strict=False)]


class Cancelled(Exception):
    """Nobody is looking any more."""


class Watched:
    """A LabModel that notes when each call came back: one call, one token."""

    def __init__(self, model: LabModel, lane: Lane, cancelled: Event) -> None:
        self._model, self._lane, self._cancelled = model, lane, cancelled
        self._start = perf_counter()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self._cancelled.is_set():
            raise Cancelled
        logits = self._model.forward(*arguments, **options)
        self._lane.times.append(perf_counter() - self._start)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Track:
    """The models that race, loaded when first used. `lock`: one race at a time, or they would slow each other down."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.lock = Lock()
        self._models: dict[str, LabModel] = {}

    def lab_model(self, backend: str) -> LabModel:
        if backend not in self._models:
            self._models[backend] = LabModel.load(self.model, backend=backend, num_kv_blocks=POOL_BLOCKS)
        return self._models[backend]


def run(track: Track, llm: LLM, prompt: str, keys: Sequence[str], num_tokens: int, pause: float = 0.1) -> Iterator[list[Lane]]:
    """Race, and yield the lanes every `pause` seconds and once at the end; closing the iterator ends the race soon after.

    What goes wrong in a lane is said in it. Raises OctavoError for an impossible prompt.
    """
    prompt_ids = list(llm.tokenizer.encode(prompt))
    if not prompt_ids or len(prompt_ids) + num_tokens > POOL_BLOCKS * 16:
        raise OctavoError("the prompt must have at least one token, and fit with its answer into 1024 tokens")
    lanes = [Lane(key) for key in keys]
    cancelled = Event()
    # not a daemon, as Streamlit's own threads are: when the app ends the models must not be in use any more
    runner = Thread(target=_run_all, args=(track, llm, prompt_ids, lanes, num_tokens, cancelled), daemon=False)
    runner.start()
    try:
        while runner.is_alive():
            yield lanes
            runner.join(pause)
        yield lanes
    finally:
        cancelled.set()


def _run_all(track: Track, llm: LLM, prompt_ids: list[int], lanes: list[Lane], num_tokens: int, cancelled: Event) -> None:
    with track.lock:
        for lane in lanes:
            try:
                if lane.way.decode is None:
                    _stream(llm, lane, prompt_ids, num_tokens, cancelled)
                else:
                    _decode(track, lane, lane.way.decode, prompt_ids, num_tokens, cancelled)
                lane.text, lane.state = llm.tokenizer.decode(lane.token_ids), "done"
            except Cancelled:
                return
            except Exception as error:  # shown in the lane: the others still race
                lane.state, lane.error = "failed", str(error) or type(error).__name__


def _decode(track: Track, lane: Lane, decode: Decode, prompt_ids: list[int], num_tokens: int, cancelled: Event) -> None:
    lane.state = "loading"
    model = track.lab_model(lane.way.backend)
    model.begin(1)
    model.forward(prompt_ids[:1])  # the first step of an engine wakes its threads and touches its memory
    lane.state = "running"
    model.begin(len(prompt_ids))
    lane.token_ids = decode(Watched(model, lane, cancelled), prompt_ids, num_tokens)


def _stream(llm: LLM, lane: Lane, prompt_ids: list[int], num_tokens: int, cancelled: Event) -> None:
    llm.generate(prompt_ids[:1], SamplingParams(temperature=0, max_tokens=1))  # as above
    llm.reset_prefix_cache()  # a prompt that is known already would be no race
    lane.state, start = "running", perf_counter()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with closing(llm.stream(prompt_ids, params)) as deltas:  # type: ignore[type-var]
        for delta in deltas:
            if cancelled.is_set():
                raise Cancelled
            lane.token_ids += delta.token_ids
            lane.times += [perf_counter() - start] * len(delta.token_ids)


def verdict(lanes: Sequence[Lane]) -> tuple[bool, str]:
    """Whether all that finished wrote the same tokens, and a sentence that says so."""
    done = [lane for lane in lanes if lane.state == "done"]
    if len(done) < 2:
        return True, "Nothing to compare: fewer than two have finished."
    first, others = done[0], [lane for lane in done[1:] if lane.token_ids != done[0].token_ids]
    if not others:
        return True, f"All {len(done)} wrote the same {len(first.token_ids)} tokens: being faster changed nothing."
    parts = []
    for lane in others:
        pairs = zip(first.token_ids, lane.token_ids, strict=False)
        place = next((at for at, (mine, other) in enumerate(pairs, 1) if mine != other), min(len(first.token_ids), len(lane.token_ids)) + 1)
        parts.append(f"{lane.way.name} differs from {first.way.name} at token {place}")
    return False, "; ".join(parts) + "."
