"""Debian's Chromium without a window, driven by selenium, for tests of the live page."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip  # several entries a line: one each would fill a screen
START_TIMEOUT_S = 300.0


def need_chromium() -> None:
    """Skips the test where there is no Chromium, but in CI, where there has to be."""
    if not (CHROMIUM.exists() and DRIVER.exists()) and not os.environ.get("CI"):
        pytest.skip("the live page needs a browser: apt-get install chromium chromium-driver")


class Browser:
    """One page in one window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def look(self, width: int, height: int, *, dark: bool = False, still: bool = False, scale: float = 1.0) -> None:
        """The screen that the page believes in; a width of less than 600 is a phone's."""
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        """Loads a page."""
        self.driver.get(url)

    def run(self, script: str, *args: object) -> Any:
        """The return value of a script."""
        return self.driver.execute_script(script, *args)

    def settle(self) -> None:
        """Waits until what was changed is laid out, and what watches sizes has seen it."""
        self.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def keys(self, selector: str, *keys: str) -> None:
        """Types into an element."""
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def touch(self, on: bool) -> None:
        """Whether fingers are what it is used with."""
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": on, "maxTouchPoints": 1})

    def tap(self, x: float, y: float) -> None:
        """With a finger, at a point of the window."""
        self.driver.execute_cdp_cmd(
            "Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]}
        )
        self.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    def press(self, *keys: str) -> None:
        """Types into whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def click(self, selector: str) -> None:
        """Clicks the first element of a kind."""
        self.driver.find_element("css selector", selector).click()

    def text(self, selector: str) -> str:
        """The text of an element, on the screen or beyond."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def complaints(self) -> list[str]:
        """The lines of the console since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]  # unannotated

    def picture(self, path: Path) -> None:
        """A PNG of the window."""
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        driver.set_page_load_timeout(START_TIMEOUT_S)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
