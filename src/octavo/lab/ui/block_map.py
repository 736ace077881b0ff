"""HTML of the block map: a cell for every block of the pool, the timeline, and what one step did.

Stateless; everything is escaped here. An owner has a colour and a name, so that no meaning hangs on colour alone.
Not here: recording (recorder.py), the page (blocks_tab.py).
"""

from __future__ import annotations

from html import escape

from octavo.engine.block_pool import BlockView
from octavo.lab.ui.recorder import Frame, Recording

#: Okabe and Ito's colours, each with the colour of text on it.
OWNERS = (("#0072B2", "#fff"), ("#E69F00", "#111"), ("#009E73", "#111"), ("#CC79A7", "#111"), ("#56B4E9", "#111"), ("#D55E00", "#111"))
SHARED, CACHED = "#7a7f87", "rgba(127,127,127,.30)"

WHY = {
    "new": "a new request, from its first token",
    "prompt": "the next piece of a prompt",
    "decode": "one more token of an answer",
    "resumed": "computed again after a preemption",
    "fork": "an answer that starts from a computed prompt",
    "starved": "its turn had come: others went first for long enough",
}

CSS = """
.bm-grid { display: grid; grid-template-columns: repeat(var(--bm-columns), minmax(0, 1fr)); gap: 5px; margin: 4px 0 2px; }
.bm-cell { position: relative; height: 42px; border-radius: 5px; display: flex; align-items: center; justify-content: center;
  font-size: 12px; font-weight: 600; border: 1px solid rgba(127,127,127,.28); cursor: default; }
.bm-cell small { font-weight: 400; opacity: .8; margin-left: 3px; font-size: 10px; }
.bm-cell.held { border-color: transparent; }
.bm-cell.cached { border: 1.5px dashed rgba(127,127,127,.75);
  background: repeating-linear-gradient(45deg, rgba(127,127,127,.16) 0 4px, transparent 4px 9px); }
.bm-cell.written { outline: 2.5px solid light-dark(#111, #fff); outline-offset: 1px; }
.bm-cell.found::before { content: ""; position: absolute; top: 4px; right: 4px; width: 5px; height: 5px;
  border-radius: 50%; background: currentColor; }
.bm-cell b { background: rgba(255,255,255,.88); color: #111; border-radius: 8px; padding: 0 6px; font-size: 11px; }
.bm-cell:nth-child(8n)::after, .bm-cell:nth-child(8n-1)::after, .bm-time i:nth-child(n+40)::after { left: auto; right: 0; }
.bm-keys { display: flex; flex-wrap: wrap; gap: 6px 16px; font-size: .8rem; align-items: center; }
.bm-keys span { display: inline-flex; align-items: center; gap: 6px; }
.bm-keys i { width: 18px; height: 14px; border-radius: 3px; display: inline-block; box-sizing: border-box; position: relative; }
.bm-time { position: relative; height: 84px; margin: 0 8px 0; }
.bm-time div { position: absolute; inset: 16px 0 0 0; display: flex; border-bottom: 1px solid rgba(127,127,127,.5); }
.bm-time i { position: relative; flex: 1; }
.bm-time i:hover { box-shadow: inset 0 0 0 1px light-dark(#111, #fff); }
.bm-time em { position: absolute; top: 0; font-style: normal; font-size: 10.5px; line-height: 15px;
  transform: translateX(-50%); white-space: nowrap; opacity: .85; }
.bm-time hr { position: absolute; top: 14px; bottom: 0; width: 2px; margin: 0; border: 0; background: light-dark(#111, #fff); }
.bm-step table { border-collapse: collapse; width: 100%; font-size: .84rem; }
.bm-step td { padding: 4px 8px 4px 0; border: 0; border-bottom: 1px solid rgba(127,127,127,.22); vertical-align: top; }
.bm-step td.num { font-variant-numeric: tabular-nums; white-space: nowrap; }
.bm-step p { font-size: .84rem; margin: 10px 0 0; line-height: 1.5; overflow-wrap: anywhere; }
.bm-chip { border-radius: 4px; padding: 1px 7px; font-weight: 600; font-size: .78rem; white-space: nowrap; }
.bm-step .muted { opacity: .65; }
"""


def colour(recording: Recording, name: str) -> tuple[str, str]:
    return OWNERS[recording.requests.index(name) % len(OWNERS)]


def chip(recording: Recording, name: str) -> str:
    if name not in recording.requests:  # it never held a block nor ran
        return f"<b>{escape(name)}</b>"
    back, text = colour(recording, name)
    return f'<span class="bm-chip" style="background:{back};color:{text}">{escape(name)}</span>'


def grid(recording: Recording, frame: Frame) -> str:
    columns = 16 if len(frame.blocks) > 32 else 8
    cells = "".join(_cell(recording, view, view.block_id in frame.written) for view in frame.blocks)
    return f'<div class="bm-grid" style="--bm-columns:{columns}">{cells}</div>'


def _cell(recording: Recording, view: BlockView, written: bool) -> str:
    classes = ["bm-cell", "held" if view.holders else "cached" if view.cached else "free"]
    classes += ["shared"] * (view.ref_count > 1) + ["written"] * written + ["found"] * (view.cached and bool(view.holders))
    style = inner = ""
    if len(view.holders) == 1:
        (holder,) = view.holders
        back, text = colour(recording, holder.request_id)
        style, inner = f"background:{back};color:{text}", f"{escape(holder.request_id)}<small>{holder.place}</small>"
    elif view.holders:
        stripes = [colour(recording, holder.request_id)[0] for holder in view.holders]
        stops = ", ".join(f"{back} {9 * place}px {9 * place + 9}px" for place, back in enumerate(stripes))
        style, inner = f"background:repeating-linear-gradient(135deg, {stops});color:#fff", f"<b>×{view.ref_count}</b>"
    tip = escape(_tip(recording, view, written))
    return f'<div class="{" ".join(classes)}" style="{style}" data-block="{view.block_id}" data-tip="{tip}">{inner}</div>'


def _tip(recording: Recording, view: BlockView, written: bool) -> str:
    size = recording.block_size
    lines = [f"block {view.block_id}"]
    lines += [f"{name}: tokens {index * size} to {index * size + size - 1}" for name, index in view.holders if index >= 0]
    state = "free: nothing of use in it" if not view.cached else "free, and findable: kept until the room is needed"
    lines.append(f"reference count {view.ref_count}" if view.holders else state)
    if view.cached and view.holders:
        lines.append("findable: another prompt may share it")
    if written:
        lines.append("written in this step")
    return "\n".join(lines)


def legend(recording: Recording) -> str:
    two = ", ".join(f"{back} {place * 5}px {place * 5 + 5}px" for place, (back, _) in enumerate(OWNERS[:2]))
    edge, ink = "border:1px solid rgba(127,127,127,.4)", "light-dark(#111, #fff)"
    hatch = "repeating-linear-gradient(45deg, rgba(127,127,127,.2) 0 4px, transparent 4px 9px)"
    keys = [
        *((f"background:{colour(recording, name)[0]}", name) for name in recording.requests),
        (f"background:repeating-linear-gradient(135deg, {two})", "shared"),
        (f"border:1.5px dashed rgba(127,127,127,.75);background:{hatch}", "free, still findable"),
        (edge, "free"),
        (f"{edge};outline:2px solid {ink};outline-offset:-1px", "written in this step"),
        (f"{edge};background:radial-gradient(circle at 70% 35%, {ink} 2.5px, transparent 3px)", "held and findable"),
    ]
    return f'<div class="bm-keys">{"".join(f"<span><i style={style!r}></i>{escape(words)}</span>" for style, words in keys)}</div>'


# The timeline


def timeline(recording: Recording, place: int) -> str:
    """Blocks by owner over the steps, stacked, with arrivals, preemptions and the current place marked."""
    count = len(recording.frames)
    layers = [*((name, colour(recording, name)[0]) for name in recording.requests), ("shared", SHARED), ("cached", CACHED)]
    columns = "".join(_column(frame, layers, recording.scenario.num_kv_blocks) for frame in recording.frames)
    marks = []
    for at, frame in enumerate(recording.frames):
        words = [f"{name} comes" for name in frame.arrived] if len(frame.arrived) < 3 else ["all come"]
        words += [f"{name} preempted" for name in frame.event.preempted]
        if words:
            shift = ";transform:none" if at < count * 0.04 else ""
            marks.append(f'<em style="left:{_x(at, count)}%{shift}">{escape(", ".join(words))}</em>')
    return f'<div class="bm-time"><div>{columns}</div>{"".join(marks)}<hr style="left:{_x(place, count)}%"/></div>'


def _column(frame: Frame, layers: list[tuple[str, str]], total: int) -> str:
    counts, stops, low = _counts(frame), [], 0
    for name, fill in layers:
        if number := counts.get(name, 0):
            stops.append(f"{fill} {low / total:.1%} {(low + number) / total:.1%}")
            low += number
    stops.append(f"transparent {low / total:.1%}")
    tip = "\n".join([f"step {frame.event.step}", *(f"{name}: {number} blocks" for name, number in counts.items())])
    return f'<i data-tip="{escape(tip)}" style="background:linear-gradient(to top, {", ".join(stops)})"></i>'


def _x(place: int, count: int) -> float:
    return round((place + 0.5) / count * 100, 2)


def _counts(frame: Frame) -> dict[str, int]:
    found: dict[str, int] = {}
    for view in frame.blocks:
        owners = {holder.request_id for holder in view.holders}
        key = "shared" if len(owners) > 1 else next(iter(owners)) if owners else "cached" if view.cached else "free"
        found[key] = found.get(key, 0) + 1
    return found


# One step


def step_table(recording: Recording, frame: Frame) -> str:
    event, rows = frame.event, []
    for entry in event.entries:
        last = entry.start + entry.num_tokens - 1
        tokens = f"token {last}" if entry.num_tokens == 1 else f"tokens {entry.start} to {last}"
        why = f"{escape(entry.why)}<span class='muted'>: {escape(WHY.get(entry.why, ''))}</span>"
        rows.append(f"<tr><td>{chip(recording, entry.request_id)}</td><td class='num'>{tokens}</td><td>{why}</td></tr>")
    ends = "".join(f"<p>{chip(recording, name)} finished</p>" for name in event.finished if name in recording.requests)
    lost = "".join(
        f"<p>{chip(recording, name)} preempted: its blocks are gone, it waits and computes again</p>" for name in event.preempted
    )
    return f'<div class="bm-step"><table>{"".join(rows)}</table>{lost}{ends}</div>'


def texts(recording: Recording, frame: Frame, most: int = 150) -> str:
    lines = []
    for name, text in frame.texts.items():
        end = text if len(text) <= most else "…" + text[-most:]
        lines.append(f"<p>{chip(recording, name)} <span class='muted'>{escape(end)}</span></p>")
    return f'<div class="bm-step">{"".join(lines)}</div>'


def figures(frame: Frame) -> list[tuple[str, str]]:
    """For markup.stats."""
    event = frame.event
    return [
        ("running", str(event.running)),
        ("waiting", str(event.waiting)),
        ("blocks taken", str(event.blocks_taken)),
        ("shared", str(event.blocks_shared)),
        ("copied", str(event.blocks_copied)),
        ("evicted", str(event.blocks_evicted)),
        ("step", f"{sum(event.timings.get(part, 0.0) for part in ('schedule', 'execute', 'update')) * 1000:.1f} ms"),
    ]
