"""A trace as one HTML file that needs nothing else: the timeline of every request, and the KV block map of each step.

The page (page.html) is fixed; the data goes into it as JSON that cannot end its element, and every name is set as text. A policy in
the file lets the browser run its own script only and load nothing. Stateless. Not here: what the page does (page.html).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from octavo.engine.events import EntryEvent
from octavo.engine.scheduler_output import TokenKind
from octavo.trace.lives import Life, lives
from octavo.trace.record import Trace, parts, seconds

_PART_NAMES = ("schedule", "prepare", "forward", "sample", "update", "detokenise", "other")
_WHYS = ("decode", "starved", "prompt", "new", "resumed", "fork")
#: Blocks drawn at most; a pool may have hundreds of thousands, of which a run uses few.
MOST_CELLS = 2048


def page(trace: Trace) -> str:
    template = files(__package__).joinpath("page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    # "<" escaped: nothing in the data can end the element or begin another
    data = json.dumps(_data(trace), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return template.replace("@SCRIPT_HASH@", f"sha256-{digest}").replace("@DATA@", data)


def _data(trace: Trace) -> dict[str, Any]:
    found = list(lives(trace).values())
    number = {life.request_id: place for place, life in enumerate(found)}
    zero = min([event.time for event in trace.steps[:1]] + [life.arrival for life in found if life.complete], default=0.0)
    groups = max([1, len(trace.num_blocks), *(len(entry.blocks) for event in trace.steps for entry in event.entries)])
    highest = [-1] * groups
    for entry in (entry for event in trace.steps for entry in event.entries):
        for group, blocks in enumerate(entry.blocks):
            highest[group] = max(highest[group], *blocks, -1)
    return {
        "model": trace.model,
        "octavo": trace.octavo,
        "gaps": trace.gaps,
        "blockSize": trace.block_size,
        "poolBlocks": [*trace.num_blocks, *(block + 1 for block in highest[len(trace.num_blocks) :])],
        "cells": [min(block + 1, MOST_CELLS) for block in highest],
        "parts": _PART_NAMES,
        "whys": _WHYS,
        "requests": [_request(trace, life, zero) for life in found],
        "steps": list(_steps(trace, number, zero)),
    }


def _request(trace: Trace, life: Life, zero: float) -> dict[str, Any]:
    text = trace.texts.get(life.request_id)
    return {
        "name": life.request_id,
        "arrival": _ms(life.arrival - zero) if life.complete and life.parent is None else None,
        "admitted": [step for step, _ in life.admissions],
        "preempted": life.preempted,
        "found": life.admissions[0][1].num_found if life.complete else 0,
        "prompt": life.num_prompt_tokens if life.complete else None,
        "output": life.num_output_tokens,
        "reason": life.finish.reason if life.finish else None,
        **({"text": [text.prompt, text.answer]} if text else {}),
    }


def _steps(trace: Trace, number: dict[str, int], zero: float) -> Iterator[list[Any]]:
    """[step, begin, length, parts, entries, dropped, running, waiting, blocks used, replayed, counts]; times in milliseconds.

    An entry: [request, first token, tokens, generated, why, blocks added to its table of each KV group].
    """
    for event in trace.steps:
        named = parts(event)
        entries = [_entry(entry, number[entry.request_id]) for entry in event.entries if entry.request_id in number]
        counts = [event.blocks_taken, event.blocks_shared, event.blocks_copied, event.blocks_evicted, event.blocks_freed]
        yield [
            event.step, _ms(event.time - zero), _ms(seconds(event)), [_ms(named[name]) for name in _PART_NAMES], entries,
            [number[name] for name in event.dropped if name in number], event.running, event.waiting, event.blocks_used,
            int(event.replayed), counts,
        ]  # fmt: skip


def _entry(entry: EntryEvent, request: int) -> list[Any]:
    generated = int(entry.kind is TokenKind.GENERATED)
    return [request, entry.start, entry.num_tokens, generated, _WHYS.index(entry.why), entry.blocks]


def _ms(value: float) -> float:
    return round(1000 * value, 4)
