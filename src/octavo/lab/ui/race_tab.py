"""The race page: ways of decoding side by side.

Owner of the last race of a browser session, in its state; the models are shared by all sessions. Not here: racing (race.py).
"""

from __future__ import annotations

from contextlib import closing
from html import escape

import streamlit as st

from octavo.errors import OctavoError
from octavo.lab.ui import charts
from octavo.lab.ui.engine import shared_llm
from octavo.lab.ui.race import WAYS, Lane, Track, run, verdict

CSS = """
.rc-lane { display: grid; grid-template-columns: 250px minmax(120px, 1fr) 190px; gap: 4px 18px; align-items: center; margin: 9px 0; }
.rc-lane b { font-size: .95rem; } .rc-lane small { display: block; opacity: .65; font-size: .76rem; line-height: 1.35; }
.rc-bar { height: 24px; border-radius: 5px; background: rgba(127,127,127,.16); overflow: hidden; }
.rc-bar i { display: block; height: 100%; border-radius: 5px; transform-origin: left; }
.rc-replay .rc-bar i { animation: rc-grow linear 1 both; }
@keyframes rc-grow { from { transform: scaleX(0); } to { transform: scaleX(1); } }
@media (prefers-reduced-motion: reduce) { .rc-replay .rc-bar i { animation: none; } }
.rc-num { font-size: .84rem; font-variant-numeric: tabular-nums; line-height: 1.35; }
.rc-text { font-size: .92rem; line-height: 1.6; white-space: pre-wrap; border-left: 3px solid rgba(127,127,127,.35); padding-left: 12px; }
.rc-text mark { background: rgba(0,158,115,.2); color: inherit; }
@media (max-width: 760px) { .rc-lane { grid-template-columns: 1fr; } }
"""
DEFAULT = ("naive", "numpy", "native", "engine")
TOKENS = 12


@st.cache_resource(show_spinner=False)
def track(model: str) -> Track:
    return Track(model)


def render(model: str) -> None:
    st.html(f"<style>{CSS}</style>")
    st.subheader("The same words, at different speeds", anchor=False)
    st.caption(
        "Every way of decoding writes the same greedy tokens after the same prompt; only what is computed again, and on which kernels, "
        "differs. They run one after the other, since they would slow each other down, and are shown side by side. "
        "More: octavo lab run standard, and docs/lab_ui.md."
    )
    left, middle, right = st.columns([5, 3, 2], vertical_alignment="bottom")
    prompt = left.text_input("Prompt", "Deep learning is", max_chars=400, key="race_prompt")
    num_tokens = middle.slider("Tokens", 4, 64, TOKENS, step=4, key="race_tokens")
    start = right.button("Race", icon=":material/flag:", type="primary", width="stretch", key="race_start")
    keys = st.pills(
        "Ways", list(WAYS), selection_mode="multi", default=DEFAULT, format_func=lambda key: WAYS[key].name, label_visibility="collapsed"
    )
    if start:
        st.session_state.pop("race", None)
        _race(model, prompt, [key for key in WAYS if key in keys], num_tokens)
    if (finished := st.session_state.get("race")) is not None:
        _show(*finished)


def _race(model: str, prompt: str, keys: list[str], num_tokens: int) -> None:
    if not keys:
        st.warning("Choose at least one way of decoding.")
        return
    place = st.empty()
    try:
        with closing(run(track(model), shared_llm(model), prompt, keys, num_tokens)) as states:  # type: ignore[type-var]
            for lanes in states:
                place.html(lanes_html(lanes, num_tokens))
        st.session_state["race"] = (prompt, num_tokens, lanes)
    except OctavoError as error:
        st.error(str(error))
    place.empty()


def _show(prompt: str, num_tokens: int, lanes: list[Lane]) -> None:
    st.html(lanes_html(lanes, num_tokens, replay=True))
    same, sentence = verdict(lanes)
    (st.success if same else st.warning)(sentence, icon=":material/check_circle:" if same else ":material/warning:")
    done = [lane for lane in lanes if lane.state == "done"]
    if not done:
        return
    st.html(f'<div class="rc-text">{escape(prompt)}<mark>{escape(done[0].text)}</mark></div>')
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown("**Time of each token**")
        st.altair_chart(charts.race_tokens(done), width="stretch")
    with right:
        st.markdown("**Total time**, and how much faster than the slowest")
        st.altair_chart(charts.race_totals(done), width="stretch")


def lanes_html(lanes: list[Lane], num_tokens: int, replay: bool = False) -> str:
    rows = []
    for lane in lanes:
        colour, share = charts.WAY_COLOURS[lane.key], min(len(lane.times) / num_tokens, 1)
        # once it is over all bars grow again, together, each in the time it really took
        style = f"width:{share:.1%};background:{colour};animation-duration:{lane.total:.2f}s"
        bar = f'<div class="rc-bar"><i style="{style}"></i></div>'
        rows.append(
            f'<div class="rc-lane" data-way="{lane.key}" data-state="{lane.state}"><div><b>{escape(lane.way.name)}</b>'
            f'<small>{escape(lane.way.note)}</small></div>{bar}<div class="rc-num">{_figures(lane)}</div></div>'
        )
    return f'<div class="{"rc-replay" if replay else ""}">{"".join(rows)}</div>'


def _figures(lane: Lane) -> str:
    if lane.state == "failed":
        return escape(lane.error[:200])
    if not lane.times:
        return escape({"loading": "loading the weights ...", "running": "reading the prompt ..."}.get(lane.state, lane.state))
    rate = f"{len(lane.times) / lane.total:.1f} tokens/s"
    return f"<b>{lane.total:.2f} s</b> &nbsp; {rate}<small>first token {lane.times[0] * 1000:.0f} ms</small>"
