"""Headless Chromium and servers for browser tests: started here, ended with the test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
START_SECONDS = 240
WAIT_MS = 120_000
MARKS = ".main-svg :is(.trace path, .point path, .hm image, .scatterlayer path)"
RUNNING = "[data-testid=stApp][data-test-script-state=running]"


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: list[str], health: str, log: Path) -> Iterator[None]:
    """`foreload COMMAND` until the block ends, begun once `health` answers."""
    with log.open("wb") as output:
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        process = subprocess.Popen(
            [sys.executable, "-c", "from foreload.cli import main; raise SystemExit(main())", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _answers(health, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server has ended: {log.read_text()[-2000:]}")
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"no answer from {url}: {log.read_text()[-2000:]}")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Look:
    """One tab on the dashboard, which notes errors and every request that leaves this machine."""

    def __init__(self, browser: Any, base: str, shots: Path) -> None:
        self.base, self.shots = base, shots
        self.context = browser.new_context(viewport={"width": 1440, "height": 1100})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.outside: list[str] = []
        self.page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.base, self.base.replace("http", "ws"), "data:", "blob:")):
            self.outside.append(request.url)

    def open(self, path: str, heading: str) -> None:
        """Go to a page and wait until it is drawn."""
        self.page.goto(f"{self.base}/{path}")
        self.page.get_by_role("heading", name=heading, exact=True).first.wait_for()
        self.settled()

    def settled(self) -> None:
        """Wait until the script has run, and see that nothing failed."""
        for _ in range(2):  # a script may ask for another run of itself
            self.page.wait_for_function(f"() => !document.querySelector('{RUNNING}')")
            self.page.wait_for_timeout(300)
        failed = self.page.locator("[data-testid=stException]")
        assert failed.count() == 0, failed.all_inner_texts()

    def metric(self, name: str) -> str:
        """The value of the tile called `name`."""
        tile = self.page.locator("[data-testid=stMetric]").filter(has_text=name).first
        return str(tile.locator("[data-testid=stMetricValue]").inner_text())

    def figures(self, number: int) -> None:
        """Wait until so many figures are on the page, each with at least one mark drawn."""
        marked = self.page.locator(f"[data-testid=stPlotlyChart]:has({MARKS})")
        marked.nth(max(0, number - 1)).wait_for() if number else self.settled()
        assert marked.count() == number

    def shot(self, name: str) -> Path:
        """A picture of the page as it is."""
        path = self.shots / f"{name}.png"
        height = self.page.locator("[data-testid=stMainBlockContainer]").evaluate("node => node.scrollHeight")
        self.page.set_viewport_size({"width": 1440, "height": max(1100, int(height))})
        self.page.wait_for_timeout(500)
        self.page.screenshot(path=path)
        self.page.set_viewport_size({"width": 1440, "height": 1100})
        return path

    def close(self) -> None:
        """End the tab."""
        self.context.close()
