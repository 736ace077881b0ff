"""The chat page: tokens as they come, and what the model thought of each.

Owner of the conversation and its settings, both in the browser session's state. Not here: the engine (engine.py), HTML
(markup.py).
"""

from __future__ import annotations

from contextlib import closing
from time import perf_counter
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.lab.ui import charts, markup
from octavo.lab.ui.answer import Answer
from octavo.lab.ui.engine import shared_llm

#: A question, or an answer.
Turn = str | Answer

#: Most often that a growing answer is drawn, seconds: drawing takes time from the engine.
REDRAW = 0.08
MAX_ANSWER = 1024
SETTINGS: dict[str, Any] = {
    "chat_temperature": 0.7,
    "chat_top_p": 0.95,
    "chat_max_tokens": 160,
    "chat_seed": "",
    "chat_system": "You are a helpful assistant. Answer briefly.",
}
QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Write a haiku about the sea.")


def keep_settings() -> None:
    """Streamlit forgets a widget that a run does not draw: written again, it survives a visit to another page."""
    for name in SETTINGS:
        if name in st.session_state:
            st.session_state[name] = st.session_state[name]


def _default_settings(llm: LLM) -> None:
    """Where nothing was set yet: the model's own, else ours."""
    own = llm.generation_defaults
    temperature, top_p = own.get("temperature"), own.get("top_p")
    given = {
        "chat_temperature": SETTINGS["chat_temperature"] if temperature is None else min(float(temperature), 2.0),
        "chat_top_p": SETTINGS["chat_top_p"] if top_p is None else max(float(top_p), 0.05),
    }
    for name, value in (SETTINGS | given).items():
        st.session_state.setdefault(name, value)


def render(model: str) -> None:
    llm = shared_llm(model)
    turns: list[Turn] = st.session_state.setdefault("turns", [])
    _default_settings(llm)
    _sidebar(llm, turns)
    st.subheader("What the model was thinking", anchor=False)
    st.caption(
        "A model gives every possible next token a probability, and one is drawn. Colour marks the tokens it was unsure of; point at "
        "one to see what else it considered and how long it took. More: docs/sampling.md and docs/lab_ui.md."
    )
    st.html(markup.legend())
    if llm.chat_template is None:
        st.warning("This model has no chat template: it completes text, and each question stands alone.")
    for turn in turns:
        _draw_turn(turn)
    suggestions = st.empty()
    asked = st.chat_input("Ask something") or (None if turns else _suggested(suggestions))
    if asked:
        suggestions.empty()
        turns.append(asked)
        _draw_turn(asked)
        _reply(llm, turns)
        st.rerun()  # once more with everything in its final place


def _sidebar(llm: LLM, turns: list[Turn]) -> None:
    with st.sidebar:
        st.markdown(f"**{llm.config.model}**")
        st.text_area("System prompt", key="chat_system", height=90)
        st.slider("Temperature", 0.0, 2.0, step=0.05, key="chat_temperature", help="0 always takes the most probable token")
        st.slider("top_p", 0.05, 1.0, step=0.05, key="chat_top_p", help="draw only from the most probable tokens that make up this share")
        st.slider("Tokens of an answer", 16, MAX_ANSWER, step=16, key="chat_max_tokens")
        st.text_input("Seed", key="chat_seed", placeholder="random", help="the same seed gives the same answer")
        if st.button("New conversation", icon=":material/restart_alt:", width="stretch", disabled=not turns):
            turns.clear()
            st.rerun()


def _suggested(place: DeltaGenerator) -> str | None:
    with place.container(horizontal=True, key="suggestions"):
        for question in QUESTIONS:
            if st.button(question):
                return question
    return None


def _draw_turn(turn: Turn) -> None:
    if isinstance(turn, str):
        with st.chat_message("user", avatar=":material/person:"):
            st.html(markup.plain(turn))
        return
    with st.chat_message("assistant", avatar=":material/menu_book:"):
        st.html(markup.answer(turn.pieces))
        st.html(markup.stats(figures(turn)))
        if turn.error:
            st.error(turn.error)
        if len(turn.tokens) > 1:
            with st.expander("Token by token"):
                st.altair_chart(charts.tokens(turn), width="stretch")


def figures(answer: Answer, now: float | None = None) -> list[tuple[str, str]]:
    """What stands under an answer; `now` while it is growing."""
    found = [("tokens", str(len(answer.tokens)))]
    if answer.ttft is not None:
        found = [("TTFT", f"{answer.ttft * 1000:.0f} ms"), *found]
    if answer.tpot:
        found[1:1] = [("TPOT", f"{answer.tpot * 1000:.1f} ms"), ("tokens/s", f"{1 / answer.tpot:.0f}")]
    if answer.num_prompt_tokens:
        found.append(("prompt", f"{answer.num_prompt_tokens} ({answer.num_cached_tokens} cached)"))
    if now is not None:
        return [*found, ("" if answer.tokens else f"reading the prompt, {now - answer.asked:.1f} s", "")]
    reasons = {None: "stopped", "abort": "stopped", "length": "cut at the limit of tokens", "stop": "", "error": "failed"}
    return [*found, (reasons.get(answer.finish_reason, ""), "")]


def _params() -> SamplingParams:
    """Raises InvalidRequestError."""
    state = st.session_state
    seed = state.chat_seed.strip()
    return SamplingParams(
        temperature=state.chat_temperature,
        top_p=state.chat_top_p,
        max_tokens=state.chat_max_tokens,
        seed=int(seed) if seed.lstrip("-").isdecimal() and len(seed) < 20 else seed or None,  # a wrong one is the engine's to refuse
        logprobs=5,
    )


def _messages(turns: list[Turn]) -> list[dict[str, str]]:
    system = st.session_state.chat_system.strip()
    found = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        if isinstance(turn, str):
            found.append({"role": "user", "content": turn})
        elif found and found[-1]["role"] == "user" and turn.text:
            found.append({"role": "assistant", "content": turn.text})
        elif found and found[-1]["role"] == "user":
            found.pop()  # a question that got no answer
    return found


def _reply(llm: LLM, turns: list[Turn]) -> None:
    """Stream an answer into the last turn. Stop, or anything else a person does, ends this run of the script in the middle:
    the generator is closed, which aborts the request, and what has come so far stays."""
    answer = Answer(asked=perf_counter())
    try:
        params, messages = _params(), _messages(turns)
        turns.append(answer)
        with st.chat_message("assistant", avatar=":material/menu_book:"):
            text, numbers = st.empty(), st.empty()
            st.button("Stop", icon=":material/stop_circle:", key="stop")
            text.html(markup.answer([], running=True))
            stream = llm.stream(messages[-1]["content"], params) if llm.chat_template is None else llm.stream_chat(messages, params)
            drawn = 0.0
            with closing(stream) as deltas:  # type: ignore[type-var]
                for delta in deltas:
                    answer.add(delta, now := perf_counter())
                    if now - drawn >= REDRAW:
                        text.html(markup.answer(answer.pieces, running=True))
                        numbers.html(markup.stats(figures(answer, now)))
                        drawn = now
    except OctavoError as error:
        answer.finish_reason, answer.error = "error", str(error)
        if turns[-1] is not answer:
            turns.append(answer)
