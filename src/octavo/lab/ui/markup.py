"""HTML of the lab's pages: tokens with their probabilities, and small figures. Everything a model or a user said is escaped here.

Stateless. Colours are the ones of Okabe and Ito, which people with any kind of colour vision can tell apart; none of them is the
only sign of what it means. Not here: the block map's cells (block_map.py), charts (charts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from octavo.lab.ui.answer import Piece, Token

#: Lower bound of probability -> class and words, most probable first.
LEVELS = (
    (0.9, "p0", "90 % and more"),
    (0.5, "p1", "50 to 90 %"),
    (0.2, "p2", "20 to 50 %"),
    (0.05, "p3", "5 to 20 %"),
    (0.0, "p4", "below 5 %"),
)

CSS = """
.stMainBlockContainer { padding-top: 4.2rem; max-width: 1180px; }
.oc-answer { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; font-size: 1rem; }
.oc-tok { position: relative; border-radius: 3px; padding: 2px 0; cursor: default; }
.oc-tok:hover { outline: 1.5px solid currentColor; z-index: 20; }
.p1 { background: rgba(230,159,0,.16); }
.p2 { background: rgba(230,159,0,.34); }
.p3 { background: rgba(213,94,0,.36); box-shadow: inset 0 -2px 0 rgba(213,94,0,.75); }
.p4 { background: rgba(213,94,0,.58); box-shadow: inset 0 -3px 0 rgba(213,94,0,1); }
[data-tip]::after { content: attr(data-tip); position: absolute; left: 0; top: calc(100% + 6px); display: none; z-index: 1000;
  white-space: pre; font: 12px/1.5 "Source Code Pro", ui-monospace, monospace; color: #f3f5f7; background: #1d2430;
  padding: 9px 12px; border-radius: 7px; box-shadow: 0 6px 24px rgba(0,0,0,.3); pointer-events: none; text-align: left; font-weight: 400; }
[data-tip]:hover::after { display: block; }
.oc-stats { display: flex; flex-wrap: wrap; gap: 6px 26px; font-size: .82rem; margin: 2px 0 4px; align-items: baseline; }
.oc-stats span { opacity: .72; white-space: nowrap; }
.oc-stats b { font-variant-numeric: tabular-nums; font-weight: 600; margin-left: 5px; }
.oc-stats span:has(b) { opacity: .95; }
.oc-legend { display: flex; flex-wrap: wrap; gap: 5px 14px; font-size: .8rem; align-items: center; }
.oc-legend i { font-style: normal; padding: 1px 7px; border-radius: 3px; }
.oc-cursor { display: inline-block; width: .5em; height: 1.05em; vertical-align: text-bottom; background: currentColor; opacity: .45; }
"""


def level(probability: float) -> str:
    return next(name for least, name, _ in LEVELS if probability >= least)


def shown(text: str, most: int = 18) -> str:
    """A token's text in a tip: blanks and line ends visible, never long."""
    visible = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    visible = "".join(c if c.isprintable() else "�" for c in visible)
    return visible if len(visible) <= most else visible[: most - 1] + "…"


def percent(probability: float) -> str:
    return f"{probability:.1%}".replace("%", " %") if probability >= 0.001 else "< 0.1 %"


def tip(token: Token) -> str:
    """What hovering shows, in plain text: the stylesheet prints it as it is."""
    lines = [
        f"{shown(token.text)}   token {token.token_id}",
        f"probability {percent(token.probability)}   rank {token.rank}",
        f"{'first after' if token.first else 'after'} {token.seconds * 1000:.1f} ms",
        "",
    ]
    width = max((len(shown(other.text)) for other in token.alternatives), default=0)
    for other in token.alternatives:
        bar = "█" * round(other.probability * 12) or "▏"
        lines.append(f"{'▸' if other.chosen else ' '} {shown(other.text):<{width}}  {percent(other.probability):>7}  {bar}")
    return "\n".join(lines)


def answer(pieces: Iterable[Piece], running: bool = False) -> str:
    """An answer as spans, one for each piece of text, coloured by its least probable token."""
    spans = []
    for piece in pieces:
        if not piece.tokens:
            spans.append(escape(piece.text))
            continue
        css = level(min(token.probability for token in piece.tokens))
        tips = "\n\n".join(tip(token) for token in piece.tokens)
        spans.append(f'<span class="oc-tok {css}" data-tip="{escape(tips)}">{escape(piece.text)}</span>')
    return f'<div class="oc-answer">{"".join(spans)}{_CURSOR if running else ""}</div>'


_CURSOR = '<span class="oc-cursor"></span>'


def plain(text: str) -> str:
    return f'<div class="oc-answer">{escape(text)}</div>'


def stats(entries: Sequence[tuple[str, str]]) -> str:
    """A row of small figures: name and value; a name alone is a remark."""
    parts = [f"<span>{escape(name)}{f'<b>{escape(value)}</b>' if value else ''}</span>" for name, value in entries]
    return f'<div class="oc-stats">{"".join(parts)}</div>'


def legend() -> str:
    return f'<div class="oc-legend">{"".join(f"<i class={name!r}>{escape(words)}</i>" for _, name, words in LEVELS)}</div>'
