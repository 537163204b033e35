"""YAML 1.1 in which `1e-3` is a number, a date is text, and values are those of JSON.

A scalar that YAML 1.1 reads as something else than most people do is an error: `no`, `010`, `1:30`.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml import YAMLError
from yaml.composer import ComposerError

__all__ = ["YAMLError", "from_yaml", "to_yaml"]


_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Reads values of JSON, and refuses a repeated key, of which PyYAML would use the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in known:
                    raise ComposerError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                if key.tag == _BOOL:
                    _refuse(self, key)
                known.add((key.tag, key.value))
        return node

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        # As the value of a key, `on` is a switch; among others it is a word, such as a class.
        node = super().compose_sequence_node(anchor)
        for one in node.value:
            if one.tag == _BOOL and one.value.lower() in ("on", "off"):
                _refuse(self, one)
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        str(value).encode()  # raises a ValueError for half of a surrogate pair
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes the texts `1e-3` and `010`."""


def _refuse(loader: _Loader, node: Any) -> None:
    raise ComposerError(
        None,
        None,
        f"{node.value} without quotes: quote a text, or write true, false or a decimal number",
        node.start_mark,
    )


_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")
# Without dates, sets and binary values, which JSON does not have.
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _TYPES
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_SCIENTIFIC = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
_AMBIGUOUS = re.compile(
    r"^([-+]?0(o[0-7]|[\d_])[\d_]*|[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?|yes|Yes|YES|no|No|NO)$"
)
_Loader.yaml_constructors["!ambiguous"] = _refuse
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("!ambiguous", _AMBIGUOUS, list("-+0123456789yYnN"))
    for _resolvers in _class.yaml_implicit_resolvers.values():  # the first that fits counts
        _resolvers.sort(key=lambda resolver: resolver[0] != "!ambiguous")
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+0123456789."))


def from_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        YAMLError: the text is not YAML, a mapping has a key twice, or a value is none of JSON.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, KeyError, RecursionError) as error:  # of values such as `0x_`
        raise YAMLError(f"{type(error).__name__}: {error}") from error


def to_yaml(data: Any) -> str:
    """Return plain data as YAML."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    return text
