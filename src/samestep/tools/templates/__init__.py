"""Templates of files that commands write."""

from __future__ import annotations

import shlex
import time
from pathlib import Path


def render(template: str, **values: object) -> str:
    """Return the text of the template `NAME.jinja` in this folder; values of HTML are escaped."""
    # Here: a package of the extra `recipes`.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        undefined=StrictUndefined,  # a misspelled name is an error, and no empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(quote=shlex.quote, join_shell=shlex.join, time=_format_time)
    return environment.get_template(f"{template}.jinja").render(values) + "\n"


def _format_time(seconds: float) -> str:
    """Return the local date and time of a Unix timestamp."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
