"""Requests as they come over HTTP: the OpenAI API's fields that an engine of one sequence can honour.

Fields of that API whose neutral value changes nothing are accepted with that value only; unknown ones are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

MAX_PROMPTS = 128
MAX_LOGPROBS = 20
SEED_LIMIT = 2**63

Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]
Empty = Annotated[dict[str, Any], Field(max_length=0)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Wire(BaseModel):
    """Base: values of exactly the named types, no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Wire):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generate(Wire):
    """Fields that both ways of asking share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # 1 if not given, 0 is greedy
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None  # drawn if not given
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: One | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Empty | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Many = Field(min_length=1, max_length=MAX_PROMPTS)


def _kind(value: Any) -> str:
    """Which of the four kinds of prompts a value is meant to be, so that errors speak of that one."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "tokens" if isinstance(first, int) else "token_lists" if isinstance(first, list) else "texts"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[Text], Many, Tag("texts")]
    | Annotated[list[TokenIds], Many, Tag("token_lists")],
    Discriminator(_kind),
]


class CompletionRequest(Generate):
    """POST /v1/completions. Several prompts are answered one after the other, as choices 0, 1, .."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 16 if not given
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: One | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class TextPart(Wire):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(Wire):
    """The one response format there is."""

    type: Literal["text"]


class ChatRequest(Generate):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # what the context holds if not given
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens say different things: give one of them")
        return self


class RecordRequest(Wire):
    """POST /engine/record/start."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.parquet$")]
    weights: bool = False
    depth: Annotated[int, Field(ge=0, le=16)] | None = None  # layers ahead to record predictions; None: all there are
    width: Annotated[int, Field(ge=1)] | None = None  # experts per prediction; None: 2 k
