"""Chat templates rendered as `transformers` renders them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreload.assets import ASSETS
from foreload.backend.chat import PLAIN_STOPS, ChatTemplate
from foreload.errors import FileError, UsageError

pytestmark = pytest.mark.integration

CHATML = """{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m['content'] | trim }}{% endgeneration %}
    {%- else %}{{ m.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TOKENS = "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ eos_token }}\n{% endfor %}{{ tools is none }}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('users speak first') }}{% endif %}ok"
TALK = [
    {"role": "user", "content": "1 < 2 & \"é\" 'x'"},
    {"role": "assistant", "content": " yes "},
    {"role": "tool", "content": "ignored"},
    {"role": "user", "content": "<b>why?</b>"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(**fields: Any) -> Path:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **fields}))
        (tmp_path / "tokenizer.json").write_bytes((ASSETS / "mini" / "tokenizer.json").read_bytes())
        return tmp_path

    return make


@pytest.mark.parametrize("source", [CHATML, TOKENS], ids=["chatml", "tokens"])
@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_renders_as_transformers(folder: Callable[..., Path], source: str, place: str) -> None:
    from transformers import PreTrainedTokenizerFast

    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    where = folder(**({} if place == "file" else {"chat_template": source if place == "config" else named}))
    if place == "file":
        (where / "chat_template.jinja").write_text(source)
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(where / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    expected = oracle.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    template = ChatTemplate.of(where)
    assert template.render(TALK) == expected
    assert template.stops == ()


def test_a_model_without_a_template_gets_the_plain_one() -> None:
    template = ChatTemplate.of(ASSETS / "mini")
    assert (template.name, template.stops) == ("plain", PLAIN_STOPS)
    assert template.render(TALK[:2]) == "User: 1 < 2 & \"é\" 'x'\n\nAssistant: yes\n\nAssistant:"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (STRICT, "users speak first"),
        ("{{ messages[9].content.x }}", "list object has no element 9"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for n in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
def test_refused_messages_and_sandbox(source: str, expected: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(UsageError, match=expected):
        template.render([{"role": "system", "content": "x"}])


def test_a_broken_template_names_its_file_and_line(folder: Callable[..., Path]) -> None:
    where = folder()
    (where / "chat_template.jinja").write_text("line\n{% for %}")
    with pytest.raises(FileError, match=r"chat_template\.jinja: chat template cannot be read: line 2: "):
        ChatTemplate.of(where)
