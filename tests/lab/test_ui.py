"""The lab's pages in headless Chromium, on the real engine in a process of its own, as a person has them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from octavo.lab.ui.recorder import record
from octavo.lab.ui.scenarios import SCENARIOS
from tests.browser import Browser

#: A hang limit: two cores may be busy with other things.
PATIENCE = 120.0
COMMAND = (sys.executable, "-m", "octavo.cli.main", "lab", "ui", "--port", "0", "--no-browser")
INPUT = "[data-testid=stChatInput] textarea"
SLIDER = "[data-testid=stSlider] input[type=range]"

LENGTH = "input[aria-label='Tokens of an answer']"


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task")
    return [int(child) for task in listed.iterdir() for child in (task / "children").read_text().split()]


@pytest.fixture(scope="module")
def lab(smollm2_path) -> Iterator[str]:
    """The URL of a running lab; afterwards Ctrl-C must end it, cleanly."""
    # a person's own settings must not open it to others
    environment = {**os.environ, "STREAMLIT_SERVER_ADDRESS": "0.0.0.0", "STREAMLIT_BROWSER_GATHER_USAGE_STATS": "true"}
    app = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert app.stdout is not None
    try:
        ready, _, _ = select.select([app.stdout], [], [], PATIENCE)
        line = app.stdout.readline() if ready else ""
        assert line.startswith("Octavo lab: http://127.0.0.1:"), (line, app.poll())
        yield line.split()[2]
        assert app.poll() is None, "the lab ended by itself"
        assert children(app.pid) == [], "it started another process"
        app.send_signal(signal.SIGINT)
        _, errors = app.communicate(timeout=PATIENCE)
        assert app.returncode == 0 and "Traceback" not in errors and "leaked" not in errors, errors
    finally:
        if app.poll() is None:
            app.kill()
            app.wait()


def no_exception(browser: Browser) -> None:
    shown = [element.text for element in browser.all("[data-testid=stException], [data-testid=stAlertContentError]")]
    assert not shown, shown
    browser.assert_clean()


def visit(browser: Browser, url: str, page: str) -> None:
    """By the link, as a person goes: Streamlit itself looks for its base path with a request that fails at a deep link."""
    browser.open(url)
    browser.click(f"a[href$={page}]", PATIENCE)


def greedy(browser: Browser) -> None:
    """The most probable tokens, so that an answer is the same everywhere."""
    from selenium.webdriver.common.keys import Keys

    browser.find("input[aria-label=Temperature]", PATIENCE).send_keys(Keys.HOME)
    browser.wait(lambda: browser.find("input[aria-label=Temperature]").get_attribute("value") == "0", "temperature 0", PATIENCE)


def idle(browser: Browser) -> None:
    browser.wait(lambda: not browser.all(".st-key-stop"), "end of the answer", PATIENCE)


# Chat


def test_chat_streams_tokens_that_say_how_probable_they_were(lab, browser):
    from selenium.webdriver import ActionChains

    browser.open(lab)
    greedy(browser)
    browser.press("capital of France", PATIENCE)
    browser.find(".oc-tok", PATIENCE)
    idle(browser)
    tokens = browser.all(".oc-tok")
    text = browser.js("return [...document.querySelectorAll('.oc-tok')].map(e => e.textContent).join('')")
    assert len(tokens) > 5 and "Paris" in text and browser.text(".oc-answer:has(.oc-tok)").split() == text.split()
    tips = [token.get_attribute("data-tip") for token in tokens]
    for tip in tips:
        assert "probability" in tip and "rank" in tip and " ms" in tip and tip.count("▸") >= 1
        assert sum("%" in line for line in tip.splitlines()) >= 6  # its own, and five alternatives
    shown = "return getComputedStyle(arguments[0], '::after').display"
    assert browser.js(shown, tokens[2]) == "none"
    ActionChains(browser.driver).move_to_element(tokens[2]).perform()
    browser.wait(lambda: browser.js(shown, tokens[2]) == "block", "tooltip")
    for name in ("TTFT", "TPOT", "tokens/s"):
        assert name in browser.text(".oc-stats")
    no_exception(browser)


def test_stop_keeps_what_came_and_the_conversation_goes_on(lab, browser):
    from selenium.webdriver.common.keys import Keys

    browser.open(lab)
    hostile = "<img src=x onerror=alert(1)><b>Count</b> from 1 to 1000, one number a line."
    browser.find(INPUT, PATIENCE)
    # a long answer, so that it cannot end by itself first
    browser.find(LENGTH).send_keys(Keys.END)
    browser.wait(lambda: browser.find(LENGTH).get_attribute("value") == "1024", "the longest answer")
    browser.find(INPUT).send_keys(hostile, Keys.ENTER)
    browser.wait(lambda: len(browser.all(".oc-tok")) > 3, "tokens", PATIENCE)
    browser.press("Stop", PATIENCE)
    idle(browser)
    kept = len(browser.all(".oc-tok"))
    assert 3 < kept < 1000
    browser.wait(lambda: "stopped" in browser.text("body"), "word that it was stopped", PATIENCE)
    questions = browser.all(".oc-answer:not(:has(.oc-tok))")
    assert hostile in [question.text for question in questions]
    assert not browser.all(".oc-answer img, .oc-answer b")
    browser.find(INPUT).send_keys("Say yes or no.", Keys.ENTER)
    browser.wait(lambda: len(browser.all("[data-testid=stChatMessage]")) == 4, "a second answer", PATIENCE)
    browser.js("document.querySelector('.st-key-stop button')?.click()")  # it may be long
    idle(browser)
    browser.click("a[href$=blocks]")
    browser.find(".bm-grid", PATIENCE)
    browser.click("a[href$='/']")
    browser.wait(lambda: len(browser.all("[data-testid=stChatMessage]")) == 4, "the conversation after a visit to another page", PATIENCE)
    assert browser.find(LENGTH).get_attribute("value") == "1024"
    no_exception(browser)


def test_two_people_share_the_engine_and_not_their_conversations(lab, browser):
    driver = browser.driver
    browser.open(lab)
    first = driver.current_window_handle
    browser.press("sky blue", PATIENCE)
    browser.find(".oc-tok", PATIENCE)
    driver.switch_to.new_window("tab")
    try:
        browser.open(lab)
        greedy(browser)
        browser.press("capital of France", PATIENCE)
        browser.find(".oc-tok", PATIENCE)
        idle(browser)
        browser.wait(lambda: "Paris" in browser.text("body"), "the answer", PATIENCE)
        assert len(browser.all("[data-testid=stChatMessage]")) == 2
        no_exception(browser)
        driver.close()
    finally:
        driver.switch_to.window(first)
    idle(browser)
    assert len(browser.all("[data-testid=stChatMessage]")) == 2 and "Paris" not in browser.text("body")
    no_exception(browser)


# Blocks


def test_block_map_shows_the_pool_step_by_step(lab, browser):
    from selenium.webdriver.common.keys import Keys

    expected = record("smollm2", SCENARIOS["prefix"])  # greedy, so the blocks are the same in this process
    visit(browser, lab, "blocks")
    browser.find(".bm-grid", PATIENCE)
    for step in (1, 10, len(expected.frames)):
        go_to(browser, step, Keys)
        frame = expected.frames[step - 1]
        cells = browser.all(".bm-cell")
        assert len(cells) == len(frame.blocks) == SCENARIOS["prefix"].num_kv_blocks
        owners = browser.js("return [...document.querySelectorAll('.bm-cell')].map(c => c.className.includes('held') ? c.textContent : '')")
        wanted = [
            ""
            if not view.holders
            else f"×{view.ref_count}"
            if view.ref_count > 1
            else f"{view.holders[0].request_id}{view.holders[0].place}"
            for view in frame.blocks
        ]
        assert owners == wanted, step
    assert max(view.ref_count for view in expected.frames[9].blocks) == 2, "step 10 has shared blocks"
    no_exception(browser)


def go_to(browser: Browser, step: int, keys) -> None:
    browser.find(SLIDER).send_keys(keys.HOME)
    browser.wait(lambda: "Step 1 of" in browser.text("body"), "the first step", PATIENCE)
    last = int(browser.find(SLIDER).get_attribute("max"))
    moves = [keys.END] if step == last else [keys.ARROW_RIGHT] * (step - 1)
    browser.find(SLIDER).send_keys(*moves)
    browser.wait(lambda: f"Step {step} of {last}" in browser.text("body"), f"step {step}", PATIENCE)


def test_block_map_plays_and_shows_a_preemption(lab, browser):
    visit(browser, lab, "blocks")
    browser.find(".bm-grid", PATIENCE)
    browser.press("A pool too small", PATIENCE)
    browser.wait(lambda: len(browser.all(".bm-cell")) == SCENARIOS["small"].num_kv_blocks, "the small pool", PATIENCE)
    assert "preempted" in browser.text(".bm-time")
    browser.press("Play", PATIENCE)
    browser.wait(lambda: "Step 3 of" in browser.text("body"), "the third step by itself", PATIENCE)
    browser.press("Pause", PATIENCE)
    browser.wait(lambda: "Play" in browser.text(".st-key-play"), "the pause", PATIENCE)
    no_exception(browser)


# Race


def test_race_ends_with_the_same_text_in_every_lane(lab, browser):
    from selenium.webdriver.common.keys import Keys

    visit(browser, lab, "race")
    browser.find(SLIDER, PATIENCE).send_keys(Keys.HOME)
    browser.wait(lambda: browser.find(SLIDER).get_attribute("value") == "4", "four tokens", PATIENCE)
    browser.click(".st-key-race_start button")
    browser.find(".rc-replay", PATIENCE)
    states = browser.js("return [...document.querySelectorAll('.rc-lane')].map(lane => [lane.dataset.way, lane.dataset.state])")
    assert states == [["naive", "done"], ["numpy", "done"], ["native", "done"], ["engine", "done"]]
    assert "All 4 wrote the same 4 tokens" in browser.text("body")
    assert browser.text(".rc-text").startswith("Deep learning is ")
    browser.wait(lambda: len(browser.all(".stVegaLiteChart canvas, .stVegaLiteChart svg.marks")) == 2, "two charts", PATIENCE)
    no_exception(browser)


# The process


def test_other_names_and_other_addresses_do_not_get_in(lab):
    """A page elsewhere whose name was pointed at this machine, and a neighbour in the network."""
    port = urlsplit(lab).port
    assert handshake(port, "127.0.0.1").startswith(b"HTTP/1.1 101")
    assert not handshake(port, "evil.example").startswith(b"HTTP/1.1 101")
    with socket.socket() as other, pytest.raises(OSError):
        other.settimeout(10)
        other.connect(("127.0.0.2", port))


def handshake(port: int, host: str) -> bytes:
    """The answer to a WebSocket's opening from a page of that host."""
    lines = (
        "GET /_stcore/stream HTTP/1.1",
        f"Host: {host}:{port}", f"Origin: http://{host}:{port}", "Connection: Upgrade", "Upgrade: websocket",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )  # fmt: skip
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return connection.recv(4096)


def test_a_race_that_is_running_when_the_lab_is_interrupted(lab, browser):
    """The last test: the fixture interrupts it, and demands a clean end."""
    visit(browser, lab, "race")
    browser.find(SLIDER, PATIENCE)
    browser.click(".st-key-race_start button")
    browser.find(".rc-lane[data-way=numpy][data-state=running]", PATIENCE)
    no_exception(browser)
