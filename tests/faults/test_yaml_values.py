"""Values that YAML 1.1 reads as something else than most people: what a person means, or an error."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.surroundings import RecordFault
from samestep.errors import RecipeError
from samestep.recipes.recipe_files import load_recipe
from samestep.recipes.yaml_text import YAMLError, from_yaml, to_yaml

MEANT: dict[str, Any] = {
    "1e-3": 0.001,
    "1E5": 1e5,
    "1_000": 1000,
    "0x1F": 31,
    "0": 0,
    "on": True,
    "off": False,
    "~": None,
    "2024-01-01": "2024-01-01",
    '"010"': "010",
    "'no'": "no",
    "y": "y",
    "nan": "nan",
}
REFUSED = (
    *("010", "-010", "08", "0o10", "0_1", "00", "1:30", "190:20:30", "12:30:45.5"),
    *("yes", "Yes", "NO", "no", "[on, dark]", "{a: [Off]}", "{on: 1}", "{no: 1}", "{a: 1, a: 2}", "=", "0x_"),
)


@pytest.mark.parametrize("text", MEANT)
def test_value_is_what_a_person_means(text: str, record_fault: RecordFault) -> None:
    value = from_yaml(f"key: {text}")["key"]
    assert (value, type(value)) == (MEANT[text], type(MEANT[text]))
    record_fault(f"`{text}` in a recipe", f"`{value!r}`")


@pytest.mark.parametrize("text", REFUSED)
def test_ambiguous_value_is_refused(text: str, record_fault: RecordFault) -> None:
    with pytest.raises(YAMLError):
        from_yaml(f"key: {text}")
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", [f"data.options={text}"])
    assert caught.value.code == "E_VALUE"
    record_fault(f"`{text}` in a recipe", "exit code 2")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("0123456789:_-+.eonyOFfsxb ", max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("noyes01:", max_size=4), inner, max_size=3),
        max_leaves=5,
    )
)
def test_written_values_are_read_again(data: Any) -> None:
    assert from_yaml(to_yaml(data)) == data
