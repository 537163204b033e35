"""Names become functions, and functions are called with options they have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.engine.loss import cross_entropy
from samestep.errors import RecipeError
from samestep.recipes.digits import DigitsNet, load_digits
from samestep.recipes.names import DATA, LOSSES, MODELS, OPTIMIZERS, call, find, takes


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("digits", DATA, load_digits),
        ("digits_net", MODELS, DigitsNet),
        ("cross_entropy", LOSSES, cross_entropy),
        ("adamw", OPTIMIZERS, torch.optim.AdamW),
        ("torch.nn:Linear", MODELS, torch.nn.Linear),
        ("torch.optim:SGD", OPTIMIZERS, torch.optim.SGD),
    ],
)
def test_names_stand_for_functions(name: str, known: dict[str, str], found: object) -> None:
    assert find(name, known, "thing") is found


@pytest.mark.parametrize("known", [DATA, MODELS, LOSSES, OPTIMIZERS])
def test_every_short_name_is_there(known: dict[str, str]) -> None:
    for name in known:
        assert callable(find(name, known, "thing"))


def test_torchvision_models_are_found_by_name() -> None:
    model = find("torchvision:squeezenet1_1", MODELS, "model")(num_classes=2)
    assert isinstance(model, torch.nn.Module)


def test_modules_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def build():\n    return 7\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert find("only_here:build", MODELS, "model")() == 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit_net", "did you mean digits_net?"),
        ("zzz", "give its import path"),
        ("no_such_module:Net", "no module no_such_module"),
        ("torch.no_such:Net", "no module torch.no_such"),
        ("torch.nn:NoSuchLayer", "NoSuchLayer"),
        ("torch:__version__", "can be called"),
        ("torchvision:resnet3", "did you mean torchvision:resnet"),
    ],
)
def test_names_that_stand_for_nothing(name: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        find(name, MODELS, "model")
    assert said in str(error.value)
    assert name.removeprefix("torchvision:") in error.value.value


def test_missing_import_inside_a_module_is_not_taken_for_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_module_either\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        find("needs_more:Net", MODELS, "model")


def plain(first: int, *, second: int, third: int = 3) -> tuple[int, int, int]:
    return first, second, third


def any_option(first: int, **more: int) -> dict[str, int]:
    return {"first": first, **more}


def test_call_passes_options_on() -> None:
    assert call(plain, {"second": 2}, 1, where="x.options") == (1, 2, 3)
    assert call(plain, {"first": 1, "second": 2, "third": 4}, where="x.options") == (1, 2, 4)
    assert call(any_option, {"other": 2}, 1, where="x.options") == {"first": 1, "other": 2}


@pytest.mark.parametrize(
    ("options", "value", "do"),
    [
        ({"secnd": 2}, "x.options.secnd is not an option", "did you mean x.options.second?"),
        ({"second": 2, "zzz": 2}, "x.options.zzz is not an option", "remove it"),
        ({}, "x.options.second is not given", "--set x.options.second=VALUE"),
        ({"second": 2, "first": 5}, "x.options.first", None),
    ],
)
def test_call_refuses_options_by_name(options: dict[str, Any], value: str, do: str | None) -> None:
    with pytest.raises(RecipeError) as error:
        call(plain, options, 1, where="x.options")
    assert value in error.value.value
    assert do is None or error.value.do == do


def test_takes_tells_whether_there_is_such_a_parameter() -> None:
    assert takes(plain, "third")
    assert not takes(plain, "fourth")
