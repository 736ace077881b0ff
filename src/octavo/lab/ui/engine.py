"""The one engine of the app, shared by all browser sessions: an LLM is safe for threads, and they share its steps.

Streamlit's resource cache owns it, until the process ends. Not here: the engines of the block map, which live for one
recording each (recorder.py).
"""

from __future__ import annotations

import streamlit as st

from octavo import LLM

#: A page needs room for a few conversations, not for a server's load.
KV_CACHE_MEMORY = "512MiB"


@st.cache_resource(show_spinner="Loading the model ...")
def shared_llm(model: str) -> LLM:
    """Raises ModelLoadError or ConfigError."""
    return LLM(model, kv_cache_memory=KV_CACHE_MEMORY)
