"""How pages that stand alone are made from their templates."""

from __future__ import annotations

from pathlib import Path

import jinja2


def page_environment() -> jinja2.Environment:
    """The templates of this folder; what a template names and is not given is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
