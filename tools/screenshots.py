"""Makes the pictures of the lab in docs/images, in headless Chromium on the real engine.

Usage: .venv/bin/python tools/screenshots.py [NAME ...]        (chat blocks preemption race; default: all)
Needs Chromium and its driver, and the extra `lab` and `test`. Not here: what is on the pages.
"""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import Browser, start_chromium  # noqa: E402

FOLDER = ROOT / "docs" / "images"
MOST_BYTES = 200_000
WIDTH = 1180
LAUNCH = "from octavo.lab.ui.launch import main; main(port=0, open_browser=False)"


def visit(browser: Browser, url: str, page: str) -> None:
    browser.open(url)
    browser.click(f"a[href$={page}]" if page else "[data-testid=stChatInput] textarea")


def go_to_step(browser: Browser, step: int) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.find(".bm-grid")
    thumb = browser.find("[data-testid=stSlider] input[type=range]")
    thumb.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * (step - 1))
    browser.wait(lambda: f"Step {step} of" in browser.text("body"), f"step {step}")


def chat(browser: Browser, url: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    visit(browser, url, "")
    browser.find("input[aria-label=Seed]").send_keys("11", Keys.ENTER)
    time.sleep(1)  # the page is drawn again
    browser.press("sky blue")
    browser.find(".oc-tok")
    browser.wait(lambda: not browser.all(".st-key-stop"), "end of the answer")
    browser.click("[data-testid=stExpander] summary")
    browser.find("[data-testid=stExpander] canvas, [data-testid=stExpander] svg.marks")
    unsure = browser.all(".oc-tok.p2") or browser.all(".oc-tok.p1")
    ActionChains(browser.driver).move_to_element(unsure[1]).perform()


def blocks(browser: Browser, url: str) -> None:
    visit(browser, url, "blocks")
    go_to_step(browser, 14)


def preemption(browser: Browser, url: str) -> None:
    browser.colour_scheme("dark")
    visit(browser, url, "blocks")
    browser.find(".bm-grid")
    browser.press("too small")
    browser.wait(lambda: len(browser.all(".bm-cell")) == 16, "the small pool")
    go_to_step(browser, 60)


def race(browser: Browser, url: str) -> None:
    visit(browser, url, "race")
    browser.press("Race")
    browser.find(".rc-replay", 180)
    browser.wait(lambda: len(browser.all(".stVegaLiteChart canvas, .stVegaLiteChart svg.marks")) == 2, "two charts")
    browser.js("document.querySelectorAll('.rc-bar i').forEach(bar => bar.style.animation = 'none')")


#: Name -> what brings the page there, and the picture's height.
PICTURES = {"chat": (chat, 1000), "blocks": (blocks, 900), "preemption": (preemption, 900), "race": (race, 1080)}


def take(browser: Browser, name: str) -> None:
    time.sleep(1.5)  # charts and fonts settle
    picture = base64.b64decode(browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    if len(picture) > MOST_BYTES:
        raise SystemExit(f"{name}: {len(picture)} bytes, at most {MOST_BYTES} are wanted")
    (FOLDER / f"lab_{name}.png").write_bytes(picture)
    print(f"docs/images/lab_{name}.png: {len(picture) // 1000} kB")


def main(names: list[str]) -> None:
    unknown = set(names) - PICTURES.keys()
    if unknown:
        raise SystemExit(f"unknown picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    app = subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = start_chromium(Path(profile))
        try:
            assert app.stdout is not None
            url = app.stdout.readline().split()[2]
            for name in names or list(PICTURES):
                make, height = PICTURES[name]
                browser.reset()
                metrics = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
                browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                make(browser, url)
                take(browser, name)
        finally:
            browser.driver.quit()
            app.send_signal(signal.SIGINT)
            app.wait(30)


if __name__ == "__main__":
    main(sys.argv[1:])
