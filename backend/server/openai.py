"""`/v1`: what clients of the OpenAI API ask."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from contextlib import suppress
from uuid import uuid4

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreload.backend.sampling import Sampling
from foreload.backend.server.context import Context, context_of
from foreload.backend.server.desk import Busy
from foreload.backend.server.errors import Refused, refusal
from foreload.backend.server.formats import ChatFormat, CompletionFormat, Format
from foreload.backend.server.job import Ask, Event, Job
from foreload.backend.server.openapi import answers, takes
from foreload.backend.server.reading import parse, read_body
from foreload.backend.server.replies import Events, EventStream, stream, whole_reply
from foreload.backend.server.wire import SEED_LIMIT, ChatRequest, CompletionRequest, Generate
from foreload.errors import UsageError

router = APIRouter(prefix="/v1")
ANSWERS = answers(200, 400, 401, 404, 429, 504, kinds=("text/event-stream",))
DEFAULT_TOKENS = 16
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@router.get("/models", responses=answers(200, 401))
async def models(request: Request) -> Response:
    """The one model there is."""
    context = context_of(request)
    limit = context.engine.options.context_tokens
    entry = {"id": context.model, "object": "model", "created": 0, "owned_by": "foreload", "max_model_len": limit}
    return JSONResponse({"object": "list", "data": [entry]})


@router.post("/completions", openapi_extra=takes(CompletionRequest), responses=ANSWERS)
async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    context = context_of(request)
    asked = parse(CompletionRequest, await read_body(request, context.options), 400)
    _check_model(context, asked)
    async with context.reading:
        ask = await run_in_threadpool(_completion, context, asked)
    return await _answer(request, context, asked, ask, CompletionFormat)


@router.post("/chat/completions", openapi_extra=takes(ChatRequest), responses=ANSWERS)
async def chat_completions(request: Request) -> Response:
    """Say the next message of a chat."""
    context = context_of(request)
    asked = parse(ChatRequest, await read_body(request, context.options), 400)
    _check_model(context, asked)
    async with context.reading:
        ask = await run_in_threadpool(_chat, context, asked)
    return await _answer(request, context, asked, ask, ChatFormat)


def _check_model(context: Context, asked: Generate) -> None:
    if asked.model != context.model:
        message = f"model {asked.model!r} is not served here: this is {context.model!r}"
        raise Refused(refusal(404, message, "model_not_found"))


def _completion(context: Context, asked: CompletionRequest) -> Ask:
    tokenizer = context.engine.tokenizer
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
    tokens = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    ask = Ask(tuple(prompts), tokens, _sampling(asked), asked.stops, asked.logprobs, bool(asked.echo))
    return _checked(context, ask)


def _chat(context: Context, asked: ChatRequest) -> Ask:
    messages = [{"role": message.role, "content": message.text} for message in asked.messages]
    try:
        text = context.template.render(messages)
    except UsageError as error:
        raise Refused(refusal(400, str(error), "invalid_messages")) from error
    prompt = context.engine.tokenizer.encode(text, special=False)
    room = context.engine.options.context_tokens - len(prompt)
    tokens = asked.max_completion_tokens or asked.max_tokens or max(1, room)
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    return _checked(context, Ask((prompt,), tokens, _sampling(asked), (*asked.stops, *context.template.stops), top))


def _sampling(asked: Generate) -> Sampling:
    """The API's defaults: temperature 1, and a seed of its own for each request."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    seed = secrets.randbelow(SEED_LIMIT) if asked.seed is None else asked.seed
    return Sampling(temperature, 1.0 if asked.top_p is None else asked.top_p, seed)


def _checked(context: Context, ask: Ask) -> Ask:
    """`ask`, if the engine can do it; Refused otherwise, before it waits in the queue."""
    for prompt in ask.prompts:
        try:
            context.engine.check_request(prompt, max(1, ask.max_tokens))
        except UsageError as error:
            too_long = len(prompt) + max(1, ask.max_tokens) > context.engine.options.context_tokens
            code = "context_length_exceeded" if too_long else "invalid_prompt"
            raise Refused(refusal(400, str(error), code)) from error
    return ask


async def _answer(request: Request, context: Context, asked: Generate, ask: Ask, form_type: type[Format]) -> Response:
    loop, events = asyncio.get_running_loop(), Events()

    def deliver(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = Job(ask, deliver, time.monotonic() + context.options.request_seconds, _request_id(request))
    try:
        position = context.desk.submit(job)
    except Busy as busy:
        code = "queue_full" if busy.status == 429 else "shutting_down"
        return refusal(busy.status, str(busy), code, Retry_After=str(busy.retry_seconds))
    form = form_type(context.engine.tokenizer, ask, context.model, job.id)
    if asked.stream:
        with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        pieces = stream(events, form, position, with_usage)
        reply: Response = EventStream(pieces, lambda: context.desk.release(job))
    else:
        try:
            reply = await whole_reply(request, events, form, len(ask.prompts))
        finally:
            context.desk.release(job)
    reply.headers["x-request-id"] = job.id
    reply.headers["x-queue-position"] = str(position)
    return reply


def _request_id(request: Request) -> str:
    """The client's own id, if it gives a plain one: with it, it finds itself in `/engine/stats`."""
    given = request.headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid4().hex
