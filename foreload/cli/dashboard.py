"""`foreload dashboard`: the what-if page in a browser."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from foreload.cli.output import JsonFlag, Output
from foreload.errors import UsageError
from foreload.files import read_mapping

THEME = {f"theme.{mode}.primaryColor": "#0d9488" for mode in ("light", "dark")}


def dashboard(
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Machine profile. Default: bundled ones of mini.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Recording, of the profile's model.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option("--validation", metavar="FILE", help="What `foreload validate --out` wrote there.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8501,
    as_json: JsonFlag = False,
) -> None:
    """Ask what if: predicted time per token while settings, memory or the machine change.

    Serves a page until it is interrupted. It needs no network; streamlit and plotly come with foreload[dashboard].
    """
    if find_spec("streamlit") is None or find_spec("plotly") is None:
        raise UsageError("streamlit and plotly are not installed: pip install 'foreload[dashboard]'")
    if (profile is None) != (trace is None):
        raise UsageError("--profile and --trace belong together: give both, or none for the bundled ones")
    if validation is not None:
        if profile is None:
            raise UsageError("--validation goes with --profile and --trace: give the files that it was made from")
        read_mapping(validation, "validation")
    from foreload.dashboard.app import data

    output = Output(as_json)
    if profile is not None and trace is not None:
        data.register(data.Source(f"{profile.stem}, {trace.stem}", profile, trace, validation))
    with output.progress() as progress:
        task = progress.add_task("starting", total=None)
        data.warm(data.names()[0], lambda what: progress.update(task, description=what))
    values = {"url": f"http://{host}:{port}", "source": data.names()[0]}
    output.finish(values, lambda console: console.print(f"{values['url']} (interrupt to end)", markup=False))
    _serve(host, port)


def _serve(host: str, port: int) -> None:
    """Run Streamlit in this process, which has everything loaded; returns when it is interrupted."""
    from streamlit import config
    from streamlit.web import bootstrap

    import foreload.dashboard.app as app

    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.maxUploadSize": 64,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        **THEME,
    }
    for name, value in options.items():
        config.set_option(name, value)
    bootstrap.run(str(Path(app.__file__).parent / "main.py"), False, [], {})
