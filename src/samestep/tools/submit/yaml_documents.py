"""YAML text of the files of jobs."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as blocks, and repeats equal parts in place of aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML file, with keys in their order and long lines."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1_000_000)
