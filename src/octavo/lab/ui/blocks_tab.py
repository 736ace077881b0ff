"""The block map page: who owns each KV block, step by step.

Owner of the place in the recording, in the browser session's state; recordings are shared by all sessions. Not here: the
engine that is recorded (recorder.py), HTML (block_map.py).
"""

from __future__ import annotations

import streamlit as st

from octavo.errors import OctavoError
from octavo.lab.ui import block_map, markup
from octavo.lab.ui.recorder import Recording, record
from octavo.lab.ui.scenarios import SCENARIOS

#: Seconds a step stays while playing.
PACE = 0.35


@st.cache_resource(show_spinner="Running the engine and recording it ...", max_entries=16)
def recorded(model: str, key: str) -> Recording:
    """Raises OctavoError."""
    return record(model, SCENARIOS[key])


def render(model: str) -> None:
    st.html(f"<style>{block_map.CSS}</style>")
    st.subheader("Who owns which block", anchor=False)
    st.caption(
        "Keys and values of past tokens are kept in blocks of 16 tokens from one small pool, so requests take memory only as they grow and "
        "can share what is equal. This is the real engine, recorded after every step. More: docs/architecture.md and docs/lab_ui.md."
    )
    titles = {key: scenario.title for key, scenario in SCENARIOS.items()}
    key = st.segmented_control("Scenario", list(titles), format_func=titles.__getitem__, default="prefix", label_visibility="collapsed")
    key = key or "prefix"
    try:
        recording = recorded(model, key)
    except OctavoError as error:
        st.error(str(error))
        return
    st.markdown(SCENARIOS[key].explanation)
    playing = st.session_state.get("playing") == key
    # a fragment: only this part is drawn again for a step
    st.fragment(_player, run_every=PACE if playing else None)(recording, key, playing)


def _player(recording: Recording, key: str, playing: bool) -> None:
    """The steps count from 1, as the engine counts them."""
    last, name = len(recording.frames), f"step_{key}"
    step = st.session_state.get(name, 1)
    st.session_state[name] = step = min(step + playing, last)
    if playing and step == last:
        st.session_state.pop("playing")
        st.rerun()
    _controls(key, name, last, playing)
    st.html(block_map.timeline(recording, step - 1))
    st.slider("Step", 1, last, key=name, label_visibility="collapsed")
    frame = recording.frames[step - 1]
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.html(block_map.grid(recording, frame))
        st.html(block_map.legend(recording))
        st.html(block_map.texts(recording, frame))
    with right:
        st.markdown(f"**Step {frame.event.step} of {last}**")
        st.html(markup.stats(block_map.figures(frame)))
        st.html(block_map.step_table(recording, frame))


def _controls(key: str, name: str, last: int, playing: bool) -> None:
    def move(by: int) -> None:
        st.session_state[name] = max(1, min(last, st.session_state[name] + by))

    def play() -> None:
        if playing:
            st.session_state.pop("playing", None)
            return
        st.session_state["playing"] = key
        if st.session_state[name] == last:
            st.session_state[name] = 1

    with st.container(horizontal=True):
        if st.button(
            "Pause" if playing else "Play", icon=":material/pause:" if playing else ":material/play_arrow:", on_click=play, key="play"
        ):
            st.rerun()  # all of the page: whether this part runs by itself is decided outside of it
        st.button("Back", icon=":material/chevron_left:", on_click=move, args=(-1,), key="back")
        st.button("Next", icon=":material/chevron_right:", on_click=move, args=(1,), key="next")
