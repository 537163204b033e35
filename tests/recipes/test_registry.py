"""Short names and import paths, and calls with options."""

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from samestep.engine.loss import cross_entropy
from samestep.errors import RecipeError
from samestep.recipes.builder import DATA, LOSSES, MODELS, OPTIMIZERS, find
from samestep.zoo.digits import DigitsNet, load_digits
from samestep.zoo.options import call, takes


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("digits", DATA, load_digits),
        ("digits_net", MODELS, DigitsNet),
        ("cross_entropy", LOSSES, cross_entropy),
        ("adamw", OPTIMIZERS, torch.optim.AdamW),
        ("torch.nn:Linear", MODELS, torch.nn.Linear),
        ("torch.optim:SGD", OPTIMIZERS, torch.optim.SGD),
    ],
)
def test_names_refer_to_objects(name: str, known: dict[str, str], expected: object) -> None:
    assert find(name, known, "thing") is expected


@pytest.mark.parametrize("known", [DATA, MODELS, LOSSES, OPTIMIZERS])
def test_every_short_name_exists(known: dict[str, str]) -> None:
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
    ("name", "message"),
    [
        ("digit_net", "did you mean digits_net?"),
        ("zzz", "give the import path"),
        ("no_such_module:Net", "no module no_such_module"),
        ("torch.no_such:Net", "no module torch.no_such"),
        ("torch.nn:NoSuchLayer", "NoSuchLayer"),
        ("torch:__version__", "a function or a class"),
        ("torchvision:resnet3", "did you mean torchvision:resnet"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        find(name, MODELS, "model")
    assert message in str(error.value)
    assert name.removeprefix("torchvision:") in error.value.value


def test_missing_import_of_a_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_module_either\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        find("needs_more:Net", MODELS, "model")


def plain(first: int, *, second: int, third: int = 3) -> tuple[int, int, int]:
    return first, second, third


def any_option(first: int, **more: int) -> dict[str, int]:
    return {"first": first, **more}


def test_call_passes_options() -> None:
    assert call(plain, {"second": 2}, 1, where="x.options") == (1, 2, 3)
    assert call(plain, {"first": 1, "second": 2, "third": 4}, where="x.options") == (1, 2, 4)
    assert call(any_option, {"other": 2}, 1, where="x.options") == {"first": 1, "other": 2}


@pytest.mark.parametrize(
    ("options", "value", "fix"),
    [
        ({"secnd": 2}, "x.options.secnd is not an option", "did you mean x.options.second?"),
        ({"second": 2, "zzz": 2}, "x.options.zzz is not an option", "remove x.options.zzz"),
        ({}, "x.options.second is missing", "--set x.options.second=VALUE"),
        ({"second": 2, "first": 5}, "x.options.first", None),
    ],
)
def test_call_refuses_unknown_and_missing_options(options: dict[str, Any], value: str, fix: str | None) -> None:
    with pytest.raises(RecipeError) as error:
        call(plain, options, 1, where="x.options")
    assert value in error.value.value
    assert fix is None or error.value.fix == fix


def test_takes_reports_parameters() -> None:
    assert takes(plain, "third")
    assert not takes(plain, "fourth")


def refuses(width: int, depth: int = 2) -> None:
    raise {1: ValueError("one"), 2: TypeError("two"), 3: MemoryError("three")}.get(
        width, RuntimeError("more\nthan a line")
    )


def as_own(function: Any) -> Any:
    """Return a function as a module of Samestep would define it."""
    own = FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    own.__module__ = "samestep.zoo.any"
    return own


@pytest.mark.parametrize(
    ("width", "message"), [(1, "ValueError: one"), (2, "TypeError: two"), (-3, "RuntimeError: more")]
)
def test_refusal_of_an_own_constructor_names_the_options(width: int, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        call(as_own(refuses), {"width": width}, where="model.options")
    assert error.value.value == f"model.options.width is {width}: {message}"
    assert (error.value.fix, error.value.code) == ("correct model.options.width", "E_VALUE")
    with pytest.raises(RecipeError) as error:
        call(as_own(refuses), {"width": width, "depth": 1}, where="model.options")
    assert error.value.fix == "correct one of model.options.width, model.options.depth"


def test_errors_of_user_code_and_of_memory_are_not_those_of_options() -> None:
    with pytest.raises(ValueError, match="one"):
        call(refuses, {"width": 1}, where="model.options")
    with pytest.raises(MemoryError):
        call(as_own(refuses), {"width": 3}, where="model.options")
    with pytest.raises(RuntimeError, match="out of memory"):
        call(as_own(exhausts), {"width": 3}, where="model.options")


def exhausts(width: int) -> None:
    raise RuntimeError("CUDA out of memory")
