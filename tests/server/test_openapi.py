"""Requests made up from the OpenAPI document: each answer is one it describes, and the engine stays alive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from running_server import Running
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


def fuzz(running: Running, examples: int) -> dict[str, set[int]]:
    """Send made-up requests, right and wrong ones, to every route; returns the statuses each gave."""
    document = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    found: dict[str, set[int]] = {}
    for operation in (made.ok() for made in document.get_all_operations()):
        seen = found.setdefault(f"{operation.method.upper()} {operation.path}", set())
        for mode in schemathesis.GenerationMode:
            if operation.body or mode is schemathesis.GenerationMode.POSITIVE:
                send_made_up(operation, mode, examples, seen)
    return found


def send_made_up(operation: Any, mode: Any, examples: int, seen: set[int]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        reply = case.call(timeout=60)
        seen.add(reply.status_code)
        case.validate_response(reply, checks=CHECKS)

    send()


@pytest.mark.integration
def test_every_answer_is_described(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start(record_folder=tmp_path)
    found = fuzz(running, 4)
    assert found["GET /v1/models"] >= {200}
    assert found["POST /v1/completions"] & {400, 404}
    assert found["PUT /engine/settings"] & {200, 422}
    assert running.client().complete().status == 200


@pytest.mark.slow
def test_every_answer_is_described_for_long(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start(record_folder=tmp_path)
    found = fuzz(running, 30)
    assert found["POST /v1/completions"] >= {200, 400}
    assert found["POST /v1/chat/completions"] >= {200, 400}
    assert found["PUT /engine/settings"] >= {200, 422}
    assert found["POST /engine/record/start"] >= {409, 422}
    assert running.client().complete().status == 200
    running.engine.brain.check_integrity()
