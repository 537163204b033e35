"""JSON schema of recipes, for editors, from the configuration classes and their docstrings."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import TypeAdapter

from samestep.config import Recipe
from samestep.recipes.settings import section_of

_ATTRIBUTE = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)


def descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of the fields of a class by name, from docstrings."""
    documents = [base.__dict__.get("__doc__") or "" for base in reversed(kind.__mro__)]
    matches = [match for document in documents for match in _ATTRIBUTE.findall(document)]
    return {name: " ".join(text.split()) for name, text in matches}


def recipe_schema() -> str:
    """Return the JSON schema of a recipe."""
    schema = TypeAdapter(Recipe).json_schema()
    kinds = {kind.__name__: kind for kind in _classes(Recipe)}
    for name, section in [("Recipe", schema), *schema["$defs"].items()]:
        texts = descriptions(kinds[name])
        section["description"] = (kinds[name].__doc__ or "").partition("\n")[0]
        for key, value in section["properties"].items():
            value.pop("title", None)
            if key in texts:
                value["description"] = texts[key]
    text = json.dumps(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1
    )
    return f"{text}\n"


def _classes(kind: Any) -> list[Any]:
    """Return a configuration class and those of its sections."""
    classes = [kind]
    for name in kind.__dataclass_fields__:
        section = section_of(kind, name)
        if section is not None:
            classes += _classes(section)
    return classes
