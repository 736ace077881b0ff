"""The fixture `browser`: headless Chromium, with what it logged and whom it asked.

Owner of the one Chromium of a test session and of its temporary profile. Every test gets it emptied: cookies, storage,
cache and logs. No name but the loopback's resolves in it, so a page that needs another host breaks here as it would
offline. Not here: any page.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

T = TypeVar("T")

#: A hang limit, never a measure.
PATIENCE = 60.0
INSTALL = "install Chromium and its driver (Debian, Ubuntu: apt install chromium chromium-driver)"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
    # no requests of Chromium's own
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
_NETWORK = {"Network.requestWillBeSent": ("request", "url"), "Network.webSocketCreated": ("url",)}
_LOCAL = ("127.0.0.1", "localhost", "::1")


class Browser:
    """A page and its record. `driver` is selenium's, for whatever is not here."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._console: list[dict[str, Any]] = []
        self._requests: list[str] = []

    def open(self, url: str) -> None:
        self.driver.get(url)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def find(self, css: str, timeout: float = PATIENCE) -> Any:
        """The first element that fits, once there is one."""
        return self.wait(lambda: next(iter(self.all(css)), None), f"an element {css!r}", timeout)

    def text(self, css: str) -> str:
        """What a reader sees of the first element that fits; "" while there is none."""
        return self.js("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", css)

    def click(self, css: str, timeout: float = PATIENCE) -> None:
        """Click the first element that fits: found and clicked at once, since pages are redrawn."""
        script = "const e = document.querySelector(arguments[0]); if (e) e.click(); return !!e"
        self.wait(lambda: self.js(script, css), f"an element {css!r}", timeout)

    def press(self, words: str, timeout: float = PATIENCE) -> None:
        """As `click`, the first enabled button whose text holds `words`."""
        script = """
            const button = [...document.querySelectorAll('button')].find(b => b.innerText.includes(arguments[0]) && !b.disabled);
            if (button) button.click();
            return !!button;"""
        self.wait(lambda: self.js(script, words), f"button {words!r}", timeout)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], T], what: str, timeout: float = PATIENCE) -> T:
        """The first true value of `condition`. Fails with `what` and the page's text when none comes."""
        from selenium.common.exceptions import StaleElementReferenceException

        end = time.monotonic() + timeout
        while True:
            try:
                if value := condition():
                    return value
            except StaleElementReferenceException:  # the page was redrawn in between: look again
                pass
            if time.monotonic() > end:
                seen = self.js("return document.body ? document.body.innerText : ''")
                pytest.fail(f"no {what} within {timeout:.0f} s; the page says: {seen[:2000]!r}; console: {self.console()}")
            time.sleep(0.05)

    def colour_scheme(self, scheme: str) -> None:
        """What the page is told a person prefers: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    # The record

    def console(self) -> list[dict[str, Any]]:
        """Everything the console has shown since the test began: level, message."""
        self._console += self.driver.get_log("browser")
        return self._console

    def requests(self) -> list[str]:
        """Every URL that was asked for since the test began, sockets too, whether or not there was an answer."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if path := _NETWORK.get(message["method"]):
                value = message["params"]
                for key in path:
                    value = value[key]
                self._requests.append(value)
        return self._requests

    def assert_clean(self) -> None:
        """No error in the console, and nobody but this machine was asked for anything."""
        severe = [entry["message"] for entry in self.console() if entry["level"] == "SEVERE"]
        assert not severe, "errors in the browser's console:\n" + "\n".join(severe)
        away = [url for url in self.requests() if urlsplit(url).scheme in ("http", "https", "ws", "wss", "ftp") and not _is_local(url)]
        assert not away, "requests to other hosts:\n" + "\n".join(away)

    def reset(self) -> None:
        """Forget everything of the test before."""
        cdp = self.driver.execute_cdp_cmd
        origin = self.js("return location.origin")
        self.driver.get("about:blank")
        if origin.startswith("http"):
            cdp("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        cdp("Network.clearBrowserCache", {})
        cdp("Network.clearBrowserCookies", {})
        cdp("Emulation.setEmulatedMedia", {"features": []})
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self._console, self._requests = [], []


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in _LOCAL


def chromium() -> tuple[str, str] | None:
    """Paths of Chromium and of its driver."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (program, driver) if program and driver else None


def start_chromium(profile: Path) -> Browser:
    """Raises RuntimeError saying what to install."""
    from selenium import webdriver

    if (found := chromium()) is None:
        raise RuntimeError(INSTALL)
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=found[1]))
    driver.set_page_load_timeout(PATIENCE)
    return Browser(driver)


@pytest.fixture(scope="session")
def chromium_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        # where everything is tested a browser is not optional
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no browser here: {INSTALL}")
    browser = start_chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium_session: Browser) -> Iterator[Browser]:
    """Chromium with nothing in it from the test before."""
    chromium_session.reset()
    yield chromium_session
