"""Templates of files that commands write."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path


def render(template: str, **values: object) -> str:
    """Return the text of the template `NAME.jinja` in this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    to_json = partial(json.dumps, ensure_ascii=False)
    environment.filters.update(quote=shlex.quote, join=shlex.join, json=to_json)
    return environment.get_template(f"{template}.jinja").render(values) + "\n"
