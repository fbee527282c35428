"""The dashboard's script, run by Streamlit's own test harness on the bundled data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")
from streamlit.testing.v1 import AppTest

import foreload.dashboard.app as app
from foreload.dashboard.app import data
from foreload.dashboard.app.labels import errors_of_all
from foreload.dashboard.app.url import seed
from foreload.errors import UsageError
from foreload.settings import Settings, slot_counts
from foreload.simulator.engine_model import simulate
from foreload.simulator.whatif import Machine, on_machine

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MAIN = Path(app.__file__).parent / "main.py"
CPU, H200 = "mini, 2 CPU cores", "mini, H200"


def start(page: str | None = None, **query: str) -> AppTest:
    """The script after its first run, on a page of its own if one is named."""
    script = AppTest.from_file(MAIN, default_timeout=300)
    for key, value in query.items():
        script.query_params[key] = value
    script.run()
    return clean(script if page is None else draw(page, query))


def draw(page: str, query: dict[str, str]) -> AppTest:
    """Only a page: the harness cannot follow links between pages that are functions."""

    def alone(name: str) -> None:
        from importlib import import_module

        from foreload.dashboard.app.controls import sidebar
        from foreload.dashboard.app.url import begin, publish

        begin()
        view = sidebar()
        if view is not None:
            import_module(f"foreload.dashboard.app.views.{name}").page(view)
        publish()

    script = AppTest.from_function(alone, kwargs={"name": page}, default_timeout=300)
    for key, value in query.items():
        script.query_params[key] = value
    return script.run()


def clean(script: AppTest) -> AppTest:
    assert [error.message for error in script.exception] == []
    return script


def metric(script: AppTest, label: str) -> str:
    return str(next(tile.value for tile in script.metric if tile.label == label))


def captions(script: AppTest) -> str:
    return " ".join(caption.value for caption in script.caption)


@pytest.fixture(autouse=True)
def _bundled_sources() -> Iterator[None]:
    known = dict(data._SOURCES)
    yield
    data._SOURCES.clear()
    data._SOURCES.update(known)
    data.load.cache_clear()


def test_the_first_page_shows_what_the_simulator_says() -> None:
    script = start()
    source = data.load(CPU)
    expected = simulate(
        source.trace,
        source.profile,
        source.shape,
        Settings(),
        slot_counts(Settings(), source.shape, 96),
        source.requests,
    )
    assert script.slider(key="memory").value == 14
    assert metric(script, "Time per token") == f"{expected.tpot_ns / 1e6:.3g} ms"
    assert metric(script, "Found on the device") == f"{expected.hit_rate:.1%}"
    assert ":violet-badge[simulated] off by 2.3 % in the median" in captions(script)


def test_a_change_of_a_control_changes_prediction_and_address() -> None:
    script = start()
    before = float(metric(script, "Time per token").split()[0])
    clean(script.button_group(key="miss").set_value("cpu").run())
    after = float(metric(script, "Time per token").split()[0])
    assert after < before / 2, "the emulated link is slow: the CPU is faster"
    assert script.query_params["miss"] == "cpu"
    clean(script.slider(key="memory").set_value(20).run())
    assert float(metric(script, "Time per token").split()[0]) < after
    assert "memory" in script.query_params


def test_an_address_shows_what_its_sender_saw() -> None:
    script = start(cache="share of experts", share="50", eviction="lfu", miss="cpu", memory="24")
    assert metric(script, "Experts kept") == "50%"
    assert (script.selectbox(key="eviction").value, script.button_group(key="miss").value) == ("lfu", "cpu")
    wrong = start(eviction="best", memory="many", share="900", cache="share of experts", link="7.0")
    assert wrong.selectbox(key="eviction").value == "lru"
    assert wrong.slider(key="share").value == 100
    fading = start(eviction="aged", half_life="20")
    assert fading.number_input(key="half_life").value == 20


def test_a_longer_context_leaves_fewer_slots() -> None:
    kept = []
    for context in ("256", "1024", "4096"):
        script = start(context=context, memory="24")
        kept.append(int(metric(script, "Experts kept").rstrip("%")))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


def test_another_machine_is_labelled_assumed() -> None:
    script = start(link="4.0")
    faster = float(metric(script, "Time per token").split()[0])
    assert faster < float(metric(start(), "Time per token").split()[0])
    assert ":orange-badge[assumed] error unknown: this machine does not exist" in captions(script)


def test_what_does_not_fit_says_so() -> None:
    script = start(cache="share of experts", share="100", memory="10")
    assert "short" in script.error[0].value
    assert len(script.metric) == 0
    wrong = start(more='{"evictor": 1}')
    assert "unknown field 'evictor'" in wrong.error[0].value
    assert "not valid JSON" in start(more="{").error[0].value
    assert "numbers with commas" in start(cache="slots by layer", slots="a,b").error[0].value


def test_what_the_recording_does_not_hold_is_named() -> None:
    script = start(draft="ngram")
    assert script.slider(key="gamma").value == 4
    assert "draft" in script.error[0].value
    assert "expert_format int8 was not measured" in start(format="int8").error[0].value
    assert "quasi_hidden" in start(predictor="quasi_hidden").error[0].value
    recorded = start(predictor="gate", depth="2", width="8")
    assert (recorded.button_group(key="depth").value, recorded.select_slider(key="width").value) == (2, 8)
    assert metric(recorded, "Time per token").endswith(" ms")


@pytest.mark.parametrize("eviction", ["aged", "static", "utility", "random"])
def test_every_eviction_is_simulated(eviction: str) -> None:
    script = start(eviction=eviction)
    assert metric(script, "Time per token").endswith(" ms")


def test_the_threshold_of_a_split() -> None:
    script = start(miss="split", split="tau", tau="2", predictor="utility")
    assert (script.selectbox(key="tau").value, script.selectbox(key="predictor").value) == ("2", "utility")
    assert metric(script, "Time per token").endswith(" ms")


def test_the_other_source_is_a_real_link_without_validation() -> None:
    script = start(source=H200)
    assert "error unknown on this machine" in captions(script)
    clean(script.selectbox(key="source").set_value(CPU).run())
    assert "off by 2.3 % in the median and 9 % in one of ten of 28 settings" in captions(script)


def test_the_bundled_validation_is_the_one_that_readme_quotes() -> None:
    script = start("validation")
    assert (metric(script, "Error, median"), metric(script, "Worst")) == ("2.3 %", "+19.6 %")
    assert "chosen among the 9 whose turns" in captions(script)
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert "28 settings of `mini`: absolute error 2.3 % in the median, 19.6 % at worst" in text


def test_errors_of_a_validation_without_those_of_all_settings() -> None:
    old = {"settings": 19, "p50_error_pct": 1.5, "p90_error_pct": 28.0, "worst_error_pct": -31.0}
    assert errors_of_all(old) == {"settings": 19, "p50": 1.5, "p90": 28.0, "worst": -31.0}


@pytest.mark.parametrize(
    ("page", "figures", "said"),
    [
        ("timeline", 1, "point at a span"),
        ("cache", 2, "the whole recording, 756 tokens"),
        ("compare", 1, "None: both are the same."),
        ("validation", 1, "link emulated at 100 MB/s"),
        ("exports", 0, "checked against llama.cpp"),
        ("tuner", 0, "integer programs propose"),
    ],
)
def test_pages_draw(page: str, figures: int, said: str) -> None:
    script = start(page)
    assert len(script.get("plotly_chart")) == figures
    assert said in captions(script)


@pytest.mark.parametrize("shown", ["found, by layer", "found, by layer and slots"])
def test_heat_maps(shown: str) -> None:
    script = start("cache")
    clean(script.button_group(key="heat").set_value(shown).run())
    assert len(script.get("plotly_chart")) == 2


def test_exports_are_those_of_the_command_line() -> None:
    script = start("exports", cache="share of experts", share="50", memory="24")
    assert script.code[0].value.startswith("llama-server -m mini.gguf")
    clean(script.selectbox(key="engine").set_value("foreload").run())
    assert json.loads(script.code[0].value)["slots_per_layer"] == [16] * 8
    clean(script.text_area(key="command").set_value("llama-server -m x -cmoe").run())
    assert any("-fit is on by default" in warning.value for warning in script.warning)
    clean(script.text_area(key="command").set_value("ollama run x").run())
    assert "whose command is this?" in script.error[0].value


def press(script: AppTest, label: str) -> AppTest:
    return clean(next(button for button in script.button if button.label == label).click().run())


@pytest.fixture
def mine(tmp_path: Path, make_profile: Any, make_trace: Any, write_trace: Any) -> Path:
    """A source of one's own, offered first: a small made-up machine and recording."""
    make_profile().save(tmp_path / "profile.json")
    write_trace(tmp_path / "trace.parquet", make_trace(requests=4, tokens=20))
    data.register(data.Source("mine", tmp_path / "profile.json", tmp_path / "trace.parquet"))
    return tmp_path


@pytest.mark.usefixtures("mine")
def test_tune_then_look_at_it() -> None:
    script = press(start("tuner"), "Run the tuner")
    best = Settings.model_validate_json(script.code[0].value)
    assert best.slots_per_layer is not None
    press(script, "Look at these settings")
    assert script.text_input(key="slots").value == ",".join(map(str, best.slots_per_layer))
    assert script.button_group(key="miss").value == best.miss_action
    assert script.selectbox(key="eviction").value == best.eviction
    press(script, "Simulate from no cache to every expert")
    assert len(script.get("plotly_chart")) == 1


@pytest.mark.usefixtures("mine")
def test_settings_kept_for_comparison() -> None:
    script = press(start("compare"), "Keep these settings")
    clean(script.selectbox(key="eviction").set_value("lfu").run())
    clean(script.selectbox(key="other").set_value("the settings kept").run())
    differing = script.dataframe[1].value
    assert differing.to_numpy().tolist() == [["eviction", "lru", "lfu"]]


def test_files_of_ones_own(mine: Path) -> None:
    tmp_path = mine
    script = start()
    assert script.selectbox(key="source").value == "mine"
    assert "error unknown on this machine" in captions(script)
    (tmp_path / "profile.json").write_text("{}")
    data.load.cache_clear()
    assert "profile.json: field 'meta' is missing" in start().error[0].value
    with pytest.raises(UsageError, match="source 'none' is unknown"):
        data.load("none")


def test_scaled_profiles_keep_what_they_do_not_change() -> None:
    source = data.load(CPU)
    faster = on_machine(source.profile, Machine(link=2.0, cpu=4.0))
    for before, after in zip(source.profile.measurements, faster.measurements, strict=True):
        if before.probe == "copy":
            assert (after.p50_us, after.source) == (pytest.approx(before.p50_us / 2), "assumed")
        elif before.probe in ("experts_cpu", "cpu_expert", "window_experts_cpu", "cpu_format"):
            assert (after.p50_us, after.source) == (pytest.approx(before.p50_us / 4), "assumed")
        elif before.probe in ("both", "copy_beside_cpu", "experts_cpu_beside_copy"):
            assert after.p50_us < before.p50_us
        else:
            assert after == before
    assert on_machine(source.profile, Machine()) is source.profile
    with pytest.raises(UsageError, match="factors above 0"):
        on_machine(source.profile, Machine(link=0))


def test_the_front_is_what_nothing_beats_in_both() -> None:
    points = [(1.0, 9.0), (2.0, 9.5), (2.0, 5.0), (3.0, 5.0), (4.0, 1.0)]
    assert data.pareto(points) == [(1.0, 9.0), (2.0, 5.0), (4.0, 1.0)]


def test_seeds_are_parsed_by_the_type_of_their_default() -> None:
    def script() -> None:
        import streamlit as st

        from foreload.dashboard.app.url import begin, publish, seed

        begin()
        values = [st.session_state[seed("a", 1.0)], st.session_state[seed("b", 2)], st.session_state[seed("c", False)]]
        st.caption(repr(values))
        publish()

    harness = AppTest.from_function(script)
    for key, value in {"a": "2.5", "b": "x", "c": "True"}.items():
        harness.query_params[key] = value
    assert harness.run().caption[0].value == "[2.5, 2, True]"
    assert harness.query_params == {"a": "2.5", "c": "True"}
    assert callable(seed)
