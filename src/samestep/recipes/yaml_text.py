"""YAML 1.1 in which `1e-3` is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml import YAMLError
from yaml.composer import ComposerError

__all__ = ["YAMLError", "from_yaml", "to_yaml"]


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, and refuses a repeated key of a mapping, of which PyYAML ignores all but the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in known:
                    raise ComposerError(None, None, f"the key {key.value!r} occurs twice", key.start_mark)
                known.add((key.tag, key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the text `1e-3`."""


_SCIENTIFIC = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+0123456789."))


def from_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        YAMLError: the text is not YAML, or a mapping has a key twice.
    """
    return yaml.load(text, Loader=_Loader)


def to_yaml(data: Any) -> str:
    """Return plain data as YAML."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    return text
