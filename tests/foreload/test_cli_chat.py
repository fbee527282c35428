"""`foreload run --chat`: turns from standard input, in the model's template."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from foreload.cli import main

pytestmark = pytest.mark.integration


def test_turns_build_on_each_other(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("And memory?\n" + "too long " * 2000 + "\nWhy?\n\nnot read\n"))
    flags = ["--chat", "--system", "Be brief.", "--prompt", "What is a kernel?", "--tokens", "6", "--context", "200"]
    assert main(["run", "mini", *flags, "--json"]) == 0
    shown = capsys.readouterr()
    made = json.loads(shown.out)
    assert shown.err.count("exceed the context") == 1
    roles = [message["role"] for message in made["messages"]]
    assert roles == ["system", *["user", "assistant"] * 3]
    assert made["messages"][5]["content"] == "Why?"
    assert all(message["content"] for message in made["messages"])
    prompts = [turn["prompt_tokens"] for turn in made["turns"]]
    assert prompts == sorted(prompts)
    assert len(prompts) == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--system", "x", "--prompt", "y"], "--system goes with --chat"),
        (["--chat", "--prompt", "x", "--prompt-file", "y"], "with --prompt or --prompt-file, one of them"),
    ],
)
def test_wrong_use(flags: list[str], expected: str, capsys: Any) -> None:
    assert main(["run", "mini", *flags]) == 2
    assert expected in capsys.readouterr().err
