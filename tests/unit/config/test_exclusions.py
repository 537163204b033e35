"""The table of options that exclude each other."""

import re
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.config.exclusions import _USES, EXCLUSIONS, excluded, require_compatible
from samestep.errors import InputError

EXCLUDED: list[dict[str, Any]] = [
    {"reduction": "exact", "gather": "bf16"},
    {"reduction": "exact", "hook": "fp16"},
    {"sharding": "hsdp", "tensor_slices": 2},
    {"sharing": "gloo", "pipeline": 2},
    {"optimizer.layer_decay": 0.5, "learning rate": None},
    {"optimizer.layer_decay": 0.5, "group_matcher": None},
]


@pytest.mark.parametrize("options", EXCLUDED, ids=str)
def test_options_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        require_compatible({**options, "another": 1})
    assert error.value.code == "E_INCOMPATIBLE"
    for name in options:
        require_compatible({key: value for key, value in options.items() if key != name})


def test_each_row_has_an_example() -> None:
    assert [tuple(options) for options in EXCLUDED] == [row.options for row in EXCLUSIONS]


@pytest.mark.parametrize("use", _USES)
def test_errors_of_uses_are_complete(use: str) -> None:
    error = excluded(use, *"abcd", error=InputError)
    assert isinstance(error, InputError)
    assert error.code == "E_INCOMPATIBLE"
    assert error.expected
    assert error.fix
    assert "{}" not in error.full_text


def test_each_use_is_refused_somewhere() -> None:
    source = "".join(path.read_text("utf-8") for path in Path(samestep.__file__).parent.rglob("*.py"))
    assert {*re.findall(r'excluded\(\s*"([^"]+)"', source)} == {*_USES}
