"""Settings: round trips, refusals that name the field, slots that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreload.errors import BudgetError, FileError, SettingsError
from foreload.settings import Settings, Utility, check_slots, slot_counts, staging_slots
from foreload.shape import ModelShape

pytestmark = pytest.mark.unit


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    predictor = draw(st.sampled_from(["none", "gate", "previous_step", "utility"]))
    k = draw(st.integers(1, 64))
    utility = Utility(
        k=k,
        signal=draw(st.sampled_from(["delta", "level"])),
        rate=draw(st.floats(0, 1)),
        adapt=draw(st.sampled_from(["real", "floored", "off"])),
        theta_up=draw(st.none() | st.floats(0, 9)),
        tau=draw(st.just("auto") | st.integers(1, k + 1)),
        reset_done=draw(st.booleans()),
    )
    split_rule = draw(st.sampled_from(["makespan", "tau", "bandwidth", "per_expert"]))
    cache: dict[str, Any] = draw(
        st.one_of(
            st.just({}),
            st.lists(st.integers(0, 200), min_size=1, max_size=6).map(lambda slots: {"slots_per_layer": tuple(slots)}),
            st.floats(0, 1).map(lambda ratio: {"cache_ratio": ratio}),
        )
    )
    return Settings(
        **cache,
        pool=draw(st.sampled_from(["layer", "shared"])),
        eviction=draw(st.sampled_from(["lru", "lfu", "lfru", "aged", "static", "utility", "random"])),
        admission=draw(st.sampled_from(["demand", "background"])),
        admit_per_step=draw(st.integers(1, 64)),
        predictor=predictor,
        prefetch_depth=draw(st.integers(1, 2)) if predictor == "gate" else 0,
        prefetch_width=draw(st.none() | st.integers(1, 64)),
        miss_action=draw(st.sampled_from(["fetch", "cpu", "split"])),
        split_rule=split_rule,
        objective=draw(st.sampled_from(["makespan", "balance"])) if split_rule in ("makespan", "tau") else "makespan",
        utility=utility,
        cpu_threads=draw(st.integers(1, 256)),
        prefill_chunk_tokens=draw(st.integers(1, 4096)),
        headroom_bytes=draw(st.integers(0, 2**40)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=any_settings(), suffix=st.sampled_from([".json", ".toml"]))
def test_round_trip(tmp_path: Path, chosen: Settings, suffix: str) -> None:
    path = tmp_path / f"settings{suffix}"
    chosen.save(path)
    assert Settings.load(path) == chosen
    assert [p.name for p in tmp_path.glob("*.partial")] == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"slots": 4}, "unknown field 'slots': known are slots_per_layer, cache_ratio, pool, eviction"),
        (
            {"eviction": "fifo"},
            "field 'eviction' is 'fifo': Input should be 'lru', 'lfu', 'lfru', 'aged', 'static', 'utility' or 'random'",
        ),
        ({"cache_ratio": 1.5}, "field 'cache_ratio' is 1.5: Input should be less than or equal to 1"),
        ({"cache_ratio": float("nan")}, "field 'cache_ratio' is nan"),
        ({"cache_ratio": "much"}, "field 'cache_ratio' is 'much'"),
        ({"slots_per_layer": [1, -1]}, "field 'slots_per_layer.1' is -1"),
        ({"slots_per_layer": [1], "cache_ratio": 0.5}, "slots_per_layer and cache_ratio exclude each other"),
        ({"prefetch_depth": 1}, "prefetch_depth 1 does not go with predictor 'none'"),
        ({"predictor": "gate"}, "prefetch_depth 0 does not go with predictor 'gate'"),
        ({"prefetch_depth": 5, "predictor": "gate"}, "field 'prefetch_depth' is 5"),
        ({"eviction": "fifo", "miss_action": "wait"}, "(and 1 more)"),
        ({"pool": "own"}, "field 'pool' is 'own': Input should be 'layer' or 'shared'"),
        ({"utility": {"levels": 4}}, "unknown field 'utility.levels': known are k, signal, rate, adapt"),
        ({"utility": {"k": 0}}, "field 'utility.k' is 0: Input should be greater than or equal to 1"),
        ({"utility": {"k": 65}}, "field 'utility.k' is 65: Input should be less than or equal to 64"),
        ({"utility": {"tau": 6}}, "field 'utility': tau 6 is above k + 1: with k 4, 'auto' or 1 to 5 is accepted"),
        ({"utility": {"tau": 0}}, "field 'utility.tau': tau is 0: 'auto' or a whole number from 1 to k + 1"),
        ({"utility": {"tau": "high"}}, "field 'utility.tau': tau is 'high': 'auto' or a whole number"),
        ({"utility": {"rate": 2}}, "field 'utility.rate' is 2: Input should be less than or equal to 1"),
        ({"predictor": "utility", "prefetch_depth": 1}, "prefetch_depth 1 does not go with predictor 'utility', which"),
        ({"predictor": "previous_step", "admission": "none"}, "predictor 'previous_step' needs an admission that"),
        ({"split_rule": "bandwidth", "objective": "balance"}, "objective 'balance' goes with split_rule 'makespan' or"),
    ],
)
def test_refusals_name_the_field(value: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.parse(value, "my.json")
    message = str(caught.value)
    assert message.startswith("my.json: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("s.json", "{", "s.json: settings is not valid JSON"),
        ("s.toml", "a = ", "s.toml: settings is not valid TOML"),
        ("s.json", "[1]", "s.json: settings must be an object with named fields, got list"),
        ("s.json", b"\xff\xfe", "s.json: settings is not valid JSON"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(FileError) as caught:
        Settings.load(path)
    assert expected in str(caught.value)


def test_describe_names_nested_fields_in_full() -> None:
    chosen = Settings(eviction="utility", utility=Utility(k=5, signal="level"))
    assert chosen.describe() == "eviction=utility utility.k=5 utility.signal=level"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no.json: settings cannot be read: No such file"):
        Settings.load(tmp_path / "no.json")


def test_changed_validates() -> None:
    changed = Settings(cache_ratio=0.5).changed(eviction="lfu")
    assert (changed.cache_ratio, changed.eviction) == (0.5, "lfu")
    with pytest.raises(SettingsError, match="exclude each other"):
        changed.changed(slots_per_layer=(1,))


def test_slot_counts(shape: ModelShape) -> None:
    assert slot_counts(Settings(slots_per_layer=(1, 2, 3)), shape) == (1, 2, 3)
    assert slot_counts(Settings(cache_ratio=0.5), shape) == (4, 4, 4)
    assert slot_counts(Settings(cache_ratio=1.0), shape) == (8, 8, 8)
    assert slot_counts(Settings(), shape, slot_budget=14) == (4, 4, 4)
    assert slot_counts(Settings(), shape, slot_budget=1000) == (8, 8, 8)
    assert slot_counts(Settings(), shape, slot_budget=0) == (0, 0, 0)
    with pytest.raises(SettingsError, match=r"slots_per_layer has 2 entries: the model has 3 MoE layers"):
        slot_counts(Settings(slots_per_layer=(1, 2)), shape)
    with pytest.raises(SettingsError, match="slots_per_layer holds 9: a layer has 8 experts"):
        slot_counts(Settings(slots_per_layer=(1, 2, 9)), shape)
    with pytest.raises(SettingsError, match="no memory budget is known"):
        slot_counts(Settings(), shape)


def test_staging(shape: ModelShape) -> None:
    assert staging_slots(Settings(), shape) == 2
    ahead = Settings(predictor="gate", prefetch_depth=2, prefetch_width=3, admission="background", admit_per_step=4)
    assert staging_slots(ahead, shape) == 2 + 2 * 3 + 4


def test_a_budget_too_small_names_the_shortfall(shape: ModelShape) -> None:
    assert check_slots(Settings(slots_per_layer=(1, 2, 3)), shape, 8, 1000) == (1, 2, 3)
    with pytest.raises(BudgetError, match=r"holds 7 expert slots, these settings need 6 and 2 for staging") as caught:
        check_slots(Settings(slots_per_layer=(1, 2, 3)), shape, 7, 1000)
    assert caught.value.shortfall_bytes == 1000
    assert caught.value.exit_code == 3
