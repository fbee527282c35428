"""The dashboard as people see it: headless Chromium, real servers, a picture of every page.

FORELOAD_SHOTS=DIR keeps the pictures.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium_look import Look, chromium, free_port, serving

pytest.importorskip("streamlit", reason="streamlit is not installed")

LINK = "100MB/s"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def base(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a dashboard on the bundled data."""
    port = free_port()
    log = tmp_path_factory.mktemp("dashboard") / "log"
    with serving(["dashboard", "--port", str(port)], f"http://127.0.0.1:{port}/_stcore/health", log):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def look(browser: Any, base: str, tmp_path: Path) -> Iterator[Look]:
    found = Look(browser, base, Path(os.environ.get("FORELOAD_SHOTS", tmp_path)))
    try:
        yield found
        assert found.outside == [], "the dashboard works offline"
    finally:
        found.close()


def picture(path: Path) -> int:
    """Different colours in a picture, as a sign that something is drawn."""
    from PIL import Image

    with Image.open(path) as image:
        assert image.width == 1440
        return len(image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).getcolors() or [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "heading", "figures"),
    [
        ("", "What if", 2),
        ("timeline", "Timeline", 1),
        ("cache", "Cache", 2),
        ("tune", "Tune", 0),
        ("compare", "Compare", 1),
        ("validation", "Validation", 1),
        ("export", "Export", 0),
        ("live", "Live engine", 0),
    ],
)
def test_every_page(look: Look, path: str, heading: str, figures: int) -> None:
    look.open(path, heading)
    look.figures(figures)
    assert picture(look.shot(path or "what-if")) > 20


@pytest.mark.integration
def test_a_change_and_its_address(look: Look) -> None:
    look.open("", "What if")
    before = float(look.metric("Time per token").split()[0])
    look.page.get_by_role("radio", name="cpu", exact=True).click()
    look.page.wait_for_url("**miss=cpu**")
    look.settled()
    after = float(look.metric("Time per token").split()[0])
    assert after < before / 2
    look.figures(2)
    look.shot("what-if-cpu")
    address = look.page.url
    look.page.get_by_role("link", name="Cache").click()
    look.page.get_by_role("heading", name="Cache", exact=True).wait_for()
    look.page.wait_for_url("**miss=cpu**")
    look.open(address.removeprefix(f"{look.base}/"), "What if")
    assert float(look.metric("Time per token").split()[0]) == after


@pytest.mark.slow
def test_a_tune(look: Look) -> None:
    look.open("tune?memory=13", "Tune")
    look.page.get_by_role("button", name="Run the tuner").click()
    look.page.get_by_role("button", name="Look at these settings").wait_for()
    look.settled()
    best, default = (float(look.metric(name).split()[0]) for name in ("Best", "Default"))
    assert best < default / 2
    look.page.get_by_role("button", name="Simulate from no cache to every expert").click()
    look.figures(1)
    look.shot("tuned")
    look.page.get_by_role("button", name="Look at these settings").click()
    look.page.wait_for_url("**cache=slots+by+layer**")
    look.page.get_by_role("link", name="What if").click()
    look.page.get_by_role("heading", name="What if", exact=True).wait_for()
    look.settled()
    look.figures(2)
    assert float(look.metric("Time per token").split()[0]) < default / 2
    look.shot("what-if-tuned")


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with opener.open(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.mark.slow
def test_a_push_into_a_live_engine(look: Look, tmp_path: Path) -> None:
    port = free_port()
    engine = f"http://127.0.0.1:{port}"
    command = ["serve", "mini", "--port", str(port), "--device", "cpu", "--link", LINK, "--vram", "24MiB"]
    with serving(command, f"{engine}/health", tmp_path / "log"):
        look.open(f"live?url={engine}&miss=cpu&cache=share+of+experts&share=25&eviction=lfu", "Live engine")
        assert look.metric("Time per token") == "no tokens yet"
        look.page.get_by_role("button", name="Push the settings of the controls").click()
        look.page.get_by_text("In force, changed:").wait_for()
        inside = ask(f"{engine}/engine/settings")["settings"]
        assert (inside["eviction"], inside["miss_action"], inside["slots_per_layer"]) == ("lfu", "cpu", [8] * 8)
        ask(f"{engine}/v1/completions", {"model": "mini", "prompt": "The kernel", "max_tokens": 48, "temperature": 0})
        look.page.reload()
        look.page.get_by_text("requests, on AMD EPYC").wait_for()
        look.settled()
        assert look.metric("Time per token").endswith(" ms")
        assert look.metric("Found on the device").endswith("%")
        look.shot("live-pushed")
        look.open(f"live?url={engine}&cache=share+of+experts&share=100&memory=40", "Live engine")
        look.page.get_by_role("button", name="Push the settings of the controls").click()
        look.page.get_by_text("the old settings stay in force").wait_for()
        assert ask(f"{engine}/engine/settings")["settings"] == inside
