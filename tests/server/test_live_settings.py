"""Settings pushed into a server that decodes: what is accepted, what is refused, and that no text changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from http_client import Client, Reply, until
from running_server import Running

from foreload.client import EngineClient
from foreload.errors import BudgetError, ForeloadError, ReloadError, SettingsError, UsageError
from foreload.settings import Settings

pytestmark = pytest.mark.integration

INVALID: list[tuple[Any, str]] = [
    ({"cache_ratio": 1.5}, "field 'cache_ratio' is 1.5: Input should be less than or equal to 1"),
    ({"cache_ratio": "0.5"}, "field 'cache_ratio' is '0.5': Input should be a valid number"),
    ({"slots": 3}, "unknown field 'slots': known are slots_per_layer, cache_ratio"),
    ({"slots_per_layer": [1, 2]}, "slots_per_layer has 2 entries: the model has 8 MoE layers"),
    ({"slots_per_layer": [33] * 8}, "slots_per_layer holds 33: a layer has 32 experts"),
    ({"eviction": "nonsense"}, "field 'eviction' is 'nonsense'"),
    ({"predictor": "gate"}, "prefetch_depth 0 does not go with predictor 'gate'"),
    ({"miss_action": "split"}, "miss_action 'split' needs measured costs"),
    ({"cache_ratio": 0.5, "slots_per_layer": [1] * 8}, "exclude each other"),
    ([], "Input should be an object"),
    (b"{", "the body is not JSON"),
    (b'{"cache_ratio": NaN}', "field"),
]


def valid(random: Random, turn: int) -> dict[str, Any]:
    """Every other resize is to .05 or back to 1."""
    settings: dict[str, Any] = {"cache_ratio": (0.05, 1.0, random.choice([0.0, 0.25, 0.5, 0.75]))[turn % 3]}
    settings["eviction"] = random.choice(["lru", "lfu", "lfru", "aged", "utility", "random"])
    settings["pool"] = random.choice(["layer", "shared"])
    settings["admission"] = random.choice(["demand", "background", "none"])
    if random.random() < 0.5:
        settings |= {"predictor": "gate", "prefetch_depth": random.choice([1, 2])}
    if random.random() < 0.5:
        settings["draft"] = {"kind": "ngram", "gamma": random.choice([1, 4])}
    return settings


@pytest.mark.parametrize(("body", "expected"), INVALID)
def test_refused_settings_leave_the_old_ones(ask: Client, body: Any, expected: str) -> None:
    before = ask("GET", "/engine/settings").json
    reply = ask("PUT", "/engine/settings", body)
    assert reply.status == 422
    assert expected in reply.error["message"]
    assert "\n" not in reply.error["message"]
    assert ask("GET", "/engine/settings").json == before


def test_what_does_not_fit_names_the_shortfall(ask: Client, running: Running, monkeypatch: Any) -> None:
    """What is missing, in whole slots, is what must be added for the same settings to be taken."""
    engine = running.engine
    monkeypatch.setattr(engine, "_vram_bytes", 20 << 20)
    reply = ask("PUT", "/engine/settings", {"cache_ratio": 1.0})
    assert reply.status == 422
    assert (reply.error["code"], reply.error["budget"]) == ("does_not_fit", "vram")
    short = reply.error["shortfall_bytes"]
    monkeypatch.setattr(engine, "_vram_bytes", (20 << 20) + short - engine.expert_bytes)
    assert ask("PUT", "/engine/settings", {"cache_ratio": 1.0}).status == 422
    monkeypatch.setattr(engine, "_vram_bytes", (20 << 20) + short)
    assert ask("PUT", "/engine/settings", {"cache_ratio": 1.0}).status == 200


def test_what_needs_a_reload(ask: Client, running: Running) -> None:
    reply = ask("PUT", "/engine/settings", {"expert_format": "int8"})
    assert (reply.status, reply.error["code"]) == (409, "needs_reload")
    assert "expert_format 'int8' needs reload" in reply.error["message"]
    drafts = {"draft": {"kind": "model", "gamma": 2, "model": "/elsewhere"}}
    reply = ask("PUT", "/engine/settings", drafts)
    assert (reply.status, reply.error["code"]) == (409, "needs_reload")
    with pytest.raises(ReloadError, match="needs reload"):
        EngineClient(running.url).apply(Settings(expert_format="int8"))


def test_the_answer_says_what_changed_and_what_it_cost(ask: Client, running: Running) -> None:
    ask("PUT", "/engine/settings", {"cache_ratio": 1.0})
    for word in ("one", "two", "three"):
        ask.complete(f"The word {word} and the others", max_tokens=24)
    grown = ask("GET", "/engine/settings").json
    kept = sum(layer["resident"] for layer in ask("GET", "/engine/stats").json["layers"])
    answer = ask("PUT", "/engine/settings", {"cache_ratio": 0.25, "eviction": "lfu"}).json
    assert answer["changed"] == {
        "cache_ratio": {"before": 1.0, "after": 0.25},
        "eviction": {"before": "lru", "after": "lfu"},
    }
    cost = answer["cost"]
    assert (cost["slots_before"], cost["slots_after"]) == (256, 64)
    assert cost["experts_kept"] + cost["experts_dropped"] == kept
    assert cost["experts_dropped"] > 0
    assert cost["device_bytes_after"] < cost["device_bytes_before"] == grown["device_bytes"]
    assert answer["now"] == ask("GET", "/engine/settings").json
    assert answer["now"]["slots_per_layer"] == [8] * 8
    assert ask("PUT", "/engine/settings", answer["now"]["settings"]).json["changed"] == {}


def queue_up(running: Running, stream: Callable[[int], None], clients: int) -> list[threading.Thread]:
    """Start clients that come one after the other while nothing decodes, and look at the queue they make."""
    threads = []
    with running.engine._turns.guest():
        for number in range(clients):
            threads.append(threading.Thread(target=stream, args=[number]))
            threads[-1].start()
            until(lambda: len(running.context.desk.positions()) == len(threads))
        waiting = running.client()("GET", "/engine/stats").json["queue"]
    assert [(w["id"], w["position"]) for w in waiting] == [(f"client-{n}", n) for n in range(clients)]
    return threads


def stream_while_pushing(running: Running, quiet: list[list[int]], pushes: int) -> list[tuple[int, Reply]]:
    """(client, its stream) in the order they ended; settings, valid and not, are pushed until a tenth is left."""
    ask, random, statistics = running.client(), Random(5), running.context.statistics
    found: list[tuple[int, Reply]] = []

    def stream(number: int) -> None:
        named = running.client(X_Request_Id=f"client-{number}")
        reply = named.complete(prompt(number), max_tokens=len(quiet[number]), stream=True)
        found.append((number, reply))

    before, statuses, ratios = statistics.generated_tokens, [], set()
    threads = queue_up(running, stream, len(quiet))
    for turn in range(pushes):
        due = before + turn * sum(map(len, quiet)) * 9 // (10 * pushes)
        until(lambda due=due: statistics.generated_tokens >= due)
        body = valid(random, turn // 2) if turn % 2 == 0 else INVALID[turn // 2 % len(INVALID)][0]
        statuses.append(ask("PUT", "/engine/settings", body).status)
        ratios.add(running.engine.settings.cache_ratio)
    assert len(found) < len(quiet)  # the last push met the last streams
    for thread in threads:
        thread.join()
    assert statuses == [200 if turn % 2 == 0 else 422 for turn in range(pushes)]
    assert ratios >= {0.05, 1.0}
    return found


def prompt(number: int) -> str:
    return f"Chapter {number}. The kernel of"


def check_streams(running: Running, clients: int, pushes: int, tokens: int) -> None:
    """Nothing dropped, reordered or altered, compared with a quiet run."""
    engine = running.engine
    prompts = [engine.tokenizer.encode(prompt(n)) for n in range(clients)]
    quiet = [engine.generate(ids, tokens).token_ids for ids in prompts]
    found = stream_while_pushing(running, quiet, pushes)
    assert [number for number, _ in found] == list(range(clients))
    for number, reply in found:
        text = "".join(event["choices"][0]["text"] for event in reply.events)
        assert text == engine.tokenizer.decode(quiet[number])
        told = [line for line in reply.body.decode().splitlines() if line.startswith(": queue position ")]
        assert [int(line.split()[-1]) for line in told] == (list(range(number, 0, -1)) or [0])
        assert reply.body.endswith(b"data: [DONE]\n\n")
    engine.brain.check_integrity()


def test_streams_are_the_same_under_pushes(running: Running) -> None:
    check_streams(running, clients=8, pushes=50, tokens=24)


@pytest.mark.slow
def test_streams_are_the_same_under_pushes_for_long(start: Callable[..., Running]) -> None:
    check_streams(start(), clients=16, pushes=400, tokens=160)


def test_client_of_the_engine(running: Running, monkeypatch: Any) -> None:
    client = EngineClient(running.url)
    assert client.apply(Settings(cache_ratio=0.25))["now"]["slots_per_layer"] == [8] * 8
    assert client.settings()["settings"]["cache_ratio"] == 0.25
    assert client.stats()["model"] == "mini"
    with pytest.raises(SettingsError, match="miss_action 'split' needs measured costs"):
        client.apply(Settings(miss_action="split"))
    monkeypatch.setattr(running.engine, "_vram_bytes", 20 << 20)
    with pytest.raises(BudgetError) as refused:
        client.apply(Settings(cache_ratio=1.0))
    assert refused.value.shortfall_bytes > 0
    with pytest.raises(UsageError, match="this server does not record"):
        client.record_start("x.parquet")
    with pytest.raises(UsageError, match="url 'localhost' is none of a server"):
        EngineClient("localhost")
    with pytest.raises(ForeloadError, match=r"no engine answers there: .*refused"):
        EngineClient("http://127.0.0.1:1").stats()
