"""`foreload serve`: the engine behind an OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from foreload.cli.engine_options import (
    AssumeProfileFlag,
    CalibrationFlag,
    ContextFlag,
    DeviceFlag,
    DraftFlag,
    DraftModelFlag,
    DtypeFlag,
    EagerFlag,
    GammaFlag,
    LinkFlag,
    ModelArg,
    ProfileFlag,
    SettingsFlag,
    ShadowFlag,
    VramFlag,
    WarmFlag,
    chosen_settings,
    engine_options,
    open_engine,
)
from foreload.cli.output import JsonFlag, Output, writable_folder
from foreload.errors import ForeloadError, UsageError
from foreload.units import parse_bytes


def serve(
    model: ModelArg,
    host: Annotated[str, typer.Option("--host", help="Address. Other than loopback: needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="FORELOAD_API_KEY", help="Asked of every request.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option("--admin-key", envvar="FORELOAD_ADMIN_KEY", help="Asked to change settings and to record."),
    ] = None,
    queue: Annotated[int, typer.Option("--queue", help="Requests that may wait.")] = 32,
    max_body: Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Largest request.")] = "4MiB",
    request_seconds: Annotated[float, typer.Option("--request-seconds", help="From arrival to the end.")] = 600.0,
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", help="For open requests, after SIGTERM.")] = 60.0,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records", metavar="FOLDER", callback=writable_folder, help="Where recordings of live traffic may go."
        ),
    ] = None,
    settings: SettingsFlag = None,
    draft: DraftFlag = None,
    gamma: GammaFlag = None,
    draft_model: DraftModelFlag = None,
    profile: ProfileFlag = None,
    assume_profile: AssumeProfileFlag = False,
    warm: WarmFlag = None,
    device: DeviceFlag = "auto",
    dtype: DtypeFlag = None,
    vram: VramFlag = None,
    link: LinkFlag = None,
    context: ContextFlag = 2048,
    eager: EagerFlag = False,
    calibration: CalibrationFlag = None,
    shadow: ShadowFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model over HTTP, with live statistics and settings.

    OpenAI-compatible; one request decodes at a time, the others wait in order. SIGTERM answers what is open, then ends.
    """
    try:
        from foreload.backend.server.options import ServerOptions
        from foreload.backend.server.run import listening
        from foreload.backend.server.run import serve as run
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'foreload[server]'") from error

    output = Output(as_json)
    options = ServerOptions(
        host=host,
        port=port,
        api_key=api_key,
        admin_key=admin_key,
        queue_limit=queue,
        body_bytes=parse_bytes(max_body, "--max-body"),
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
        record_folder=records,
    )
    chosen = engine_options(device, dtype, vram, link, context, calibration, shadow, eager)
    wanted = chosen_settings(settings, None, chosen, draft, gamma, draft_model)
    with (
        listening(options) as bound,
        open_engine(model, chosen, wanted, profile, output, warm, assume_profile) as engine,
    ):
        name = engine.checkpoint.name

        def started(url: str) -> None:
            values = {"url": url, "model": name, "settings": engine.settings.describe()}
            output.finish(values, lambda console: console.print(f"{name} at {url}/v1 ({engine.describe_memory()})"))
            sys.stdout.flush()

        if not run(engine, options, bound, started):
            raise ForeloadError("requests were open when the server ended")
