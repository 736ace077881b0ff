"""A real engine driven step by step, and who owned which KV block after each of them.

A recording owns the engine for as long as it takes and keeps plain data. Not here: what is driven (scenarios.py), drawing
(block_map.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.block_pool import BlockView
from octavo.engine.events import StepEvent
from octavo.wiring import EngineParts

#: A recording that goes on for longer is cut: it is meant to be looked at.
MAX_STEPS = 240


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the step before which it comes."""

    name: str
    #: Text, or the messages of a chat.
    prompt: str | list[dict[str, str]]
    step: int = 0
    max_tokens: int = 32
    n: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    explanation: str
    arrivals: Sequence[Arrival]
    num_kv_blocks: int = 96
    #: Fields of EngineConfig beside the pool's size.
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frame:
    """The engine after one step."""

    event: StepEvent
    blocks: list[BlockView]
    #: Blocks whose KV this step wrote.
    written: frozenset[int]
    #: Answers so far, by request.
    texts: dict[str, str]
    arrived: list[str]


@dataclass(frozen=True, slots=True)
class Recording:
    scenario: Scenario
    block_size: int
    frames: list[Frame]
    #: Every request that ever ran, in order of appearance; the choices of n are "name#0", "name#1", ...
    requests: list[str]


def record(model: str, scenario: Scenario) -> Recording:
    """Load the model with the scenario's pool, run everything, and close it again. Raises OctavoError."""
    config = replace(EngineConfig(model=model, num_kv_blocks=scenario.num_kv_blocks), **scenario.settings)
    return record_parts(EngineParts.load(config), scenario)


def record_parts(parts: EngineParts, scenario: Scenario) -> Recording:
    core, inputs = parts.core(), parts.input_processor()
    waiting = sorted(scenario.arrivals, key=lambda arrival: arrival.step)
    recording = Recording(scenario, parts.executor.info.kv_groups[0].block_size, [], [])
    texts: dict[str, str] = {}
    try:
        while len(recording.frames) < MAX_STEPS:
            arrived = []
            while waiting and (waiting[0].step <= len(recording.frames) or not core.has_unfinished_requests()):
                arrival = waiting.pop(0)
                _submit(core, inputs, arrival)
                arrived.append(arrival.name)
            if not core.has_unfinished_requests():
                break
            for delta in core.step():
                name = f"{delta.request_id}#{delta.index}" if _choices(scenario, delta.request_id) > 1 else delta.request_id
                texts[name] = texts.get(name, "") + delta.text
            (event,) = core.events.recent(1)
            blocks = core.kv.snapshot()
            recording.frames.append(Frame(event, blocks, _written(event, blocks, recording.block_size), dict(texts), arrived))
            seen = [entry.request_id for entry in event.entries] + [holder.request_id for view in blocks for holder in view.holders]
            recording.requests.extend(dict.fromkeys(name for name in seen if name not in recording.requests))
    finally:
        core.close()
    return recording


def _submit(core: Any, inputs: Any, arrival: Arrival) -> None:
    params = SamplingParams(temperature=0.8 if arrival.n > 1 else 0.0, seed=7, max_tokens=arrival.max_tokens, n=arrival.n, ignore_eos=True)
    if isinstance(arrival.prompt, str):
        core.add_request(inputs.process(arrival.name, arrival.prompt, params))
    elif inputs.chat_template is None:
        core.add_request(inputs.process(arrival.name, "\n\n".join(message["content"] for message in arrival.prompt), params))
    else:
        core.add_request(inputs.process_chat(arrival.name, arrival.prompt, params))


def _choices(scenario: Scenario, name: str) -> int:
    return next(arrival.n for arrival in scenario.arrivals if arrival.name == name)


def _written(event: StepEvent, blocks: list[BlockView], block_size: int) -> frozenset[int]:
    """Blocks in which the tokens of this step's entries lie; those of a request that has ended are nobody's any more."""
    spans = {entry.request_id: (entry.start // block_size, (entry.start + entry.num_tokens - 1) // block_size) for entry in event.entries}
    return frozenset(
        view.block_id
        for view in blocks
        for name, index in view.holders
        if name in spans and view.ref_count == 1 and spans[name][0] <= index <= spans[name][1]
    )
