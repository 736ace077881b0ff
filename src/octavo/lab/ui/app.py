"""The app Streamlit runs: once for every interaction of every browser session, from top to bottom.

The model's name is the one argument. Owner of nothing: the engine is shared (engine.py), the rest is in the session.
Not here: the pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

from octavo.lab.ui import blocks_tab, chat_tab, markup, race_tab

#: A file of our own: Streamlit would fetch a named icon from another host.
ICON = str(Path(__file__).with_name("icon.svg"))


def main(model: str) -> None:
    st.set_page_config(page_title="Octavo lab", page_icon=ICON, layout="wide", initial_sidebar_state="expanded")
    st.html(f"<style>{markup.CSS}</style>")
    pages = [
        st.Page(lambda: chat_tab.render(model), title="Chat", icon=":material/forum:", url_path="chat", default=True),
        st.Page(lambda: blocks_tab.render(model), title="KV blocks", icon=":material/grid_view:", url_path="blocks"),
        st.Page(lambda: race_tab.render(model), title="Race", icon=":material/flag:", url_path="race"),
    ]
    chat_tab.keep_settings()
    st.navigation(pages, position="top").run()


main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
