"""The chat page in a real browser, on the real application over a scripted model, and once on the real one."""

from __future__ import annotations

import base64
import hashlib
import re
import time

import httpx2
import pytest

from octavo.server import page
from tests.server.fake_server import alphabet, alphabet_once, fake_server
from tests.server.real_server import wait_for

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def server():
    with fake_server(alphabet_once) as made:
        yield made


def ask(browser, text: str) -> None:
    browser.find("#prompt").send_keys(text + "\n")


def wait_done(browser, answers: int = 1) -> None:
    browser.wait(lambda: len(browser.all(".message.assistant:not(.busy)")) == answers and not browser.all(".busy"), "finished answer")


def test_an_answer_appears_while_it_comes(browser, server):
    browser.open(server.url + "/")
    browser.wait(lambda: browser.text("#model") == "org/fake", "name of the model")
    assert browser.js("return document.activeElement.id") == "prompt" and not browser.find("#send").is_enabled()
    seen = []

    def hold(output):
        # the model goes on once the page shows what it has said so far
        if len(server.executor.outputs) > 8:
            server.gate.wait(30)

    server.executor.outputs.clear()
    server.gate.clear()
    server.executor.before_step = hold
    try:
        ask(browser, "hello")
        seen.append(browser.wait(lambda: browser.text(".message.busy .text"), "text of an answer that is not finished"))
        assert browser.find("#stop").is_displayed() and not browser.find("#send").is_displayed()
        assert browser.js("return document.getElementById('log').getAttribute('aria-busy')") == "true"
        assert re.fullmatch(r"\d+ tokens?( · [\d.]+ tokens/s)? · first token [\d.]+ m?s", browser.text(".message.busy .stats"))
    finally:
        server.gate.set()
        server.executor.before_step = lambda output: None
    wait_done(browser)
    assert ALPHABET.startswith(seen[0]) and seen[0] != ALPHABET
    assert browser.text(".message.assistant .text") == ALPHABET
    assert browser.text(".message.user .text") == "hello"
    assert browser.text(".message.assistant .stats").startswith("27 tokens · ")  # the end-of-sequence token counts
    assert browser.find("#send").is_displayed() and not browser.find("#stop").is_displayed()
    browser.assert_clean()


def test_turns_settings_and_new_chat(browser, server):
    browser.open(server.url + "/")
    browser.find("#settings-open").click()
    browser.find("#system").send_keys("be brief")
    browser.find("#temperature").send_keys("0")
    browser.find("#max-tokens").send_keys("5")
    browser.find("#settings .strong").click()
    ask(browser, "one")
    wait_done(browser)
    assert browser.text(".message.assistant .text") == "abcde" and "longest answer" in browser.text(".message.assistant .note")
    ask(browser, "two")
    wait_done(browser, 2)
    sent = httpx2.Response(200, content=server.inputs.seen[-1].body).json()
    assert sent["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "abcde"}, {"role": "user", "content": "two"},
    ]  # fmt: skip
    assert sent["temperature"] == 0 and sent["max_tokens"] == 5 and sent["stream"] is True
    browser.find(".again").click()  # the last answer once more: the same conversation
    wait_for(lambda: len(server.inputs.seen) > 2 and server.is_idle(), "another answer")
    wait_done(browser, 2)
    assert httpx2.Response(200, content=server.inputs.seen[-1].body).json()["messages"] == sent["messages"]
    browser.find("#new").click()
    assert not browser.all(".message") and browser.find("#welcome").is_displayed()
    ask(browser, "three")
    wait_done(browser)
    assert len(httpx2.Response(200, content=server.inputs.seen[-1].body).json()["messages"]) == 2
    browser.driver.refresh()  # settings stay
    assert browser.js("return document.getElementById('max-tokens').value") == "5"
    browser.assert_clean()


def test_shift_enter_and_markup_in_questions(browser, server):
    from selenium.webdriver.common.keys import Keys

    browser.open(server.url + "/")
    text = "<b>bold</b><img src=x onerror=alert(1)>"
    browser.find("#prompt").send_keys(text, Keys.SHIFT, Keys.ENTER, Keys.NULL, "second line")
    assert not browser.all(".message")
    browser.find("#send").click()
    wait_done(browser)
    assert browser.text(".message.user .text") == text + "\nsecond line" and not browser.all(".message b, .message img")
    browser.assert_clean()


HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (HOSTILE, [("P", HOSTILE)]),
        ("a\n\nb `c` **d**", [("P", "a"), ("P", "b c d")]),
        (f"x\n```python\n{HOSTILE}\n\nprint(1)\n```\ny", [("P", "x"), ("DIV", f"{HOSTILE}\n\nprint(1)"), ("P", "y")]),
        ("```\nnot finished", [("DIV", "not finished")]),
        ("~~~~\n```\n~~~~", [("DIV", "```")]),
        (
            "[a](javascript:alert(1)) <a href='javascript:alert(1)'>b</a>",
            [("P", "[a](javascript:alert(1)) <a href='javascript:alert(1)'>b</a>")],
        ),
        ("", []),
    ],
)
def test_answers_become_text_however_they_are_cut(browser, server, text, blocks):
    browser.open(server.url + "/")
    shown = browser.js(
        """
        const [text] = arguments;
        const pieces = (container) => [...container.children].map(
            (e) => [e.tagName, e.tagName === "P" ? e.textContent : e.querySelector("code").textContent]);
        const whole = document.createElement("div"), grown = document.createElement("div");
        document.body.append(whole, grown);
        show(whole, text);
        for (let end = 0; end <= text.length; end += 1) show(grown, text.slice(0, end));
        const bad = document.querySelectorAll("#log script, #log img, #log a").length
            + whole.querySelectorAll("script, img, a").length + grown.querySelectorAll("script, img, a").length;
        return [pieces(whole), pieces(grown), whole.innerHTML === grown.innerHTML, bad, window.hacked || 0];
        """,
        text,
    )
    assert shown == [[list(block) for block in blocks]] * 2 + [True, 0, 0]


def test_stop(browser):
    with fake_server(alphabet, engine={"num_blocks": 60_000}) as server:
        server.executor.before_step = lambda output: time.sleep(0.005)
        for way in ("button", "escape", "new chat", "leave"):
            browser.open(server.url + "/")
            ask(browser, "hello")
            browser.wait(lambda: len(browser.text(".message.busy .text")) > 5, "text")
            if way == "button":
                browser.find("#stop").click()
            elif way == "escape":
                browser.find("#prompt").send_keys("\ue00c")
            elif way == "new chat":
                browser.find("#new").click()
            else:
                browser.open("about:blank")
            wait_for(server.is_idle, f"idle server after {way}")
            if way in ("button", "escape"):
                wait_done(browser)
                said = browser.text(".message.assistant .text")
                assert (ALPHABET * 400).startswith(said) and browser.text(".note") == "Stopped."
                assert browser.find("#send").is_displayed()
            if way == "new chat":
                assert not browser.all(".message") and browser.find("#send").is_displayed()
        browser.assert_clean()


def test_errors_are_shown_and_can_be_retried(browser, server):
    browser.open(server.url + "/")
    browser.wait(lambda: browser.text("#model") == "org/fake", "name of the model")
    server.state.draining = True
    ask(browser, "hello")
    browser.wait(lambda: "shutting down" in browser.text(".problem"), "error")
    assert browser.js("return document.querySelector('.problem').getAttribute('role')") == "alert"
    server.state.draining = False
    browser.find(".problem button").click()
    wait_done(browser)
    assert browser.text(".message.assistant .text") == ALPHABET and not browser.all(".problem")
    assert len(browser.all(".message.user")) == 1


def test_key(browser):
    with fake_server(api_key=("sesame",)) as server:
        browser.open(server.url + "/")
        browser.wait(lambda: browser.find("#key-panel").is_displayed(), "question for the key")
        browser.find("#key").send_keys("wrong\n")
        ask(browser, "hello")
        browser.wait(lambda: "does not know" in browser.text("#key-help"), "question for another key")
        browser.find("#key").send_keys("sesame\n")
        wait_done(browser)  # what was asked is answered now
        assert browser.text(".message.assistant .text") == ALPHABET and not browser.find("#key-panel").is_displayed()
        assert browser.js("return Object.keys(localStorage).filter((name) => localStorage[name].includes('sesame')).length") == 0
        browser.driver.refresh()
        ask(browser, "again")
        wait_done(browser)
        assert not browser.find("#key-panel").is_displayed()
        assert "sesame" not in browser.driver.current_url


def test_themes(browser, server):
    def background() -> str:
        return browser.js("return getComputedStyle(document.body).backgroundColor")

    def is_dark() -> bool:
        return sum(map(int, re.findall(r"\d+", background())[:3])) < 200

    for scheme in ("light", "dark"):
        browser.colour_scheme(scheme)
        browser.open(server.url + "/")
        browser.js("localStorage.clear()")
        browser.driver.refresh()
        assert is_dark() is (scheme == "dark")
        browser.find("#theme").click()
        assert is_dark() is (scheme == "light")
        browser.driver.refresh()  # the choice is kept
        assert is_dark() is (scheme == "light")
    browser.assert_clean()


def test_people_without_a_mouse_or_without_eyes(browser, server):
    browser.open(server.url + "/")
    unnamed = browser.js(
        """
        const named = (e) => (e.getAttribute("aria-label") || e.innerText || e.textContent || "").trim() || (e.labels && e.labels.length);
        return [...document.querySelectorAll("button, input, textarea, dialog")]
            .filter((e) => !named(e) && !e.getAttribute("aria-labelledby")).map((e) => e.outerHTML);
        """
    )
    assert unnamed == []
    assert browser.js("return document.documentElement.lang") == "en"
    assert browser.js("return document.querySelector('#announce').getAttribute('aria-live')") == "polite"
    ask(browser, "hello")
    wait_done(browser)
    assert ALPHABET in browser.js("return document.querySelector('#announce').textContent")


def test_a_telephone(browser, server):
    cdp = browser.driver.execute_cdp_cmd
    cdp("Emulation.setDeviceMetricsOverride", {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True})
    try:
        browser.open(server.url + "/")
        ask(browser, "w" * 200)
        wait_done(browser)
        assert browser.js("return document.documentElement.scrollWidth") <= 360
        for css in ("#send", "#new", "#theme", "#settings-open", "#prompt"):
            box = browser.find(css).rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 640, css
    finally:
        cdp("Emulation.clearDeviceMetricsOverride", {})


def test_the_policy_allows_this_file_and_nothing_else(server):
    with server.client() as client:
        reply = client.get("/")
        assert client.head("/").status_code == 200
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    scripts = re.findall(rb"<script>(.*?)</script>", reply.content, re.DOTALL)
    assert len(scripts) == 2 and reply.content.count(b"<script") == 2
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" in policy["script-src"].split()
    assert not re.search(rb'\son\w+="|style="|innerHTML|insertAdjacentHTML|document\.write|eval\(', reply.content)
    assert not re.search(rb"""(?:src|href)=["'](?!data:)|@import|url\(""", reply.content)
    changed = page.content_security_policy(reply.content.replace(b"const chat =", b"const chat  ="))
    assert changed != reply.headers["content-security-policy"]


def test_the_real_model(browser, real):
    browser.open(real.url + "/")
    browser.wait(lambda: browser.text("#model") == "smollm2", "name of the model")
    browser.find(".idea").click()
    wait_done(browser)
    assert "Paris" in browser.text(".message.assistant .text")
    browser.assert_clean()
