"""Starts the lab's app: one process, on the loopback only, with nothing sent anywhere.

Stateless. Not here: the app (app.py).
"""

from __future__ import annotations

import logging
import socket
import threading
import urllib.request
import webbrowser
from pathlib import Path
from time import sleep
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.wiring import find_model

HOST = "127.0.0.1"
PORT = 8501


def settings(port: int) -> dict[str, Any]:
    """Streamlit's settings; they win over the user's own config.toml and environment."""
    return {
        "server.address": HOST,
        "server.port": port,
        "server.headless": True,  # no browser, no questions: both are ours
        "server.showEmailPrompt": False,
        "server.fileWatcherType": "none",
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "server.enableStaticServing": False,
        # names a page elsewhere could point at this machine do not get in
        "server.allowedHosts": [HOST, "localhost"],
        "browser.serverAddress": HOST,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorLinks": False,
        "logger.hideWelcomeMessage": True,
        "logger.level": "warning",
        "theme.light.primaryColor": "#0072B2",
        "theme.dark.primaryColor": "#56B4E9",
    }


def main(model: str | None = None, *, port: int = PORT, open_browser: bool = True) -> None:
    """Serve until Ctrl-C or SIGTERM. Port 0: any free one. Raises ConfigError or ModelLoadError before anything listens."""
    try:
        from streamlit.web import bootstrap
    except ImportError:
        raise ConfigError("the lab's pages need Streamlit: pip install 'octavo[lab]'") from None
    config = EngineConfig() if model is None else EngineConfig(model=model)
    find_model(config)  # a wrong name is an error here, not a page that cannot work
    port = free_port(port)
    flags = settings(port)
    bootstrap.load_config_options(flags)
    logging.getLogger("streamlit").setLevel(logging.WARNING)
    threading.Thread(target=announce, args=(f"http://{HOST}:{port}", open_browser), daemon=True).start()
    bootstrap.run(str(Path(__file__).with_name("app.py")), False, [config.model], flags)


def free_port(port: int) -> int:
    """`port`, or some free one for 0. Raises ConfigError where it is taken."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used ({error.strerror}): choose another, or 0 for any free one") from None
        return int(probe.getsockname()[1])


def announce(url: str, open_browser: bool, tries: int = 600) -> None:
    """Say where it is once it answers, and show it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(tries):
        try:
            direct.open(f"{url}/_stcore/health", timeout=1).close()
        except OSError:
            sleep(0.1)
            continue
        print(f"Octavo lab: {url}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            webbrowser.open(url)
        return
