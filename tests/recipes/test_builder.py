"""Weights and data of a recipe; short names and import paths, and calls with options."""

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers.system import here
from samestep.config import RecipeStep
from samestep.errors import EXIT_INPUT, DataError, RecipeError
from samestep.recipes.builder import DATA, LOSSES, MODELS, build_loss, find
from samestep.recipes.models import freeze, load_matching, transform_model
from samestep.recipes.optimizers import OPTIMIZERS
from samestep.recipes.recipe_files import load_recipe
from samestep.zoo.digits import DigitsNet, load_digits
from samestep.zoo.losses import cross_entropy
from samestep.zoo.options import call

SIZES = "loss.options={in_features: 8, n_classes: 10, cutoffs: [4]}"

# --- weights ---------------------------------------------------------------------------------------------


def net(classes: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(classes)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, classes))


def saved(path: Path, state: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["loss.options.reduction=sum", "accumulate=2"], "E_INCOMPATIBLE"),
        (["loss.name='torch.nn:AdaptiveLogSoftmaxWithLoss'", SIZES], "E_OPTIMIZER"),
    ],
)
def test_loss_that_cannot_be_trained_with_is_refused(settings: list[str], code: str) -> None:
    with pytest.raises(RecipeError) as error:
        build_loss(load_recipe("digits", ["loss.name='torch.nn:CrossEntropyLoss'", *settings]), torch.device("cpu"))
    assert error.value.code == code


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a.pt"])
def test_weights_are_taken_where_name_and_shape_match(tmp_path: Path, name: str) -> None:
    given, model = net(5), net(3)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    file = saved(tmp_path / name, {**given.state_dict(), "extra": torch.zeros(1)})
    assert load_matching(model, file) == [
        f"pretrained: {len(before) - 2} tensors taken, 3 left out",
        "  left out 3.weight: (3, 8) here, (5, 8) in the file",
        "  left out 3.bias: (3,) here, (5,) in the file",
        "  left out extra: only in the file",
    ]
    for key, tensor in model.state_dict().items():
        is_taken = not key.startswith("3.")
        assert torch.equal(tensor, given.state_dict()[key] if is_taken else before[key])


def test_names_in_the_file_are_those_of_a_part_of_the_model(tmp_path: Path) -> None:
    encoder, model = net(3), torch.nn.ModuleDict({"encoder": net(3), "decoder": torch.nn.Linear(3, 2)})
    file = saved(tmp_path / "a.pth", {f"module.{name}": tensor for name, tensor in encoder.state_dict().items()})
    with pytest.raises(DataError, match=r"model\.pretrained_prefix=PREFIX"):
        load_matching(model, file)
    assert load_matching(model, file, "encoder.")[-2:] == [
        "  left out decoder.weight: (2, 3) here, not in the file",
        "  left out decoder.bias: (2,) here, not in the file",
    ]
    assert all(
        torch.equal(model["encoder"].state_dict()[name], tensor) for name, tensor in encoder.state_dict().items()
    )
    with pytest.raises(DataError, match="rename them"):
        load_matching(model, file, "backbone.")


def test_file_of_weights_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    torch.save({"0.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(DataError, match="cannot be read as weights"):
        load_matching(net(3), tmp_path / "trap.pth")
    assert not (tmp_path / "sprung").exists()


def test_freeze_takes_the_gradient_from_what_matches() -> None:
    model = net(3)
    assert freeze(model, ["0.*", "*.bias"]) == ["0.weight", "0.bias", "1.bias", "3.bias"]
    assert [name for name, tensor in model.named_parameters() if tensor.requires_grad] == ["1.weight", "3.weight"]


def test_all_but_some_parameters_are_frozen() -> None:
    model = net(3)
    assert freeze(model, [], ["3.*"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [name for name, tensor in model.named_parameters() if tensor.requires_grad] == ["3.weight", "3.bias"]
    assert freeze(net(3), ["*.bias"], ["3.*"]) == ["0.bias", "1.bias"]
    with pytest.raises(RecipeError, match=r"model\.freeze_except: '2\.\*' matches no parameter"):
        freeze(net(3), [], ["2.*"])


@pytest.mark.parametrize(("patterns", "message"), [(["2.*"], "'2.*' matches no"), (["0.*", "*"], "every parameter")])
def test_freeze_refuses_what_makes_no_sense_and_changes_nothing(patterns: list[str], message: str) -> None:
    model = net(3)
    with pytest.raises(RecipeError, match=message.replace("*", r"\*")):
        freeze(model, patterns)
    assert all(tensor.requires_grad for tensor in model.parameters())


# --- short names, import paths and calls with options ---


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


@pytest.mark.parametrize(
    ("options", "value", "fix"),
    [
        ({"secnd": 2}, "x.options.secnd is not an option", "did you mean x.options.second?"),
        ({"second": 2, "zzz": 2}, "x.options.zzz is not an option", "remove x.options.zzz"),
        ({}, "x.options.second is missing", "x.options.second=VALUE"),
        ({"second": 2, "first": 5}, "x.options.first", None),
    ],
)
def test_call_refuses_unknown_and_missing_options(options: dict[str, Any], value: str, fix: str | None) -> None:
    with pytest.raises(RecipeError) as error:
        call(plain, options, 1, where="x.options")
    assert value in error.value.value
    assert fix is None or error.value.fix == fix


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
    assert error.value.fix == "correct model.options.width or model.options.depth"


def test_errors_of_user_code_and_of_memory_are_not_those_of_options() -> None:
    with pytest.raises(ValueError, match="one"):
        call(refuses, {"width": 1}, where="model.options")
    with pytest.raises(MemoryError):
        call(as_own(refuses), {"width": 3}, where="model.options")
    with pytest.raises(RuntimeError, match="out of memory"):
        call(as_own(exhausts), {"width": 3}, where="model.options")


def exhausts(width: int) -> None:
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    ("loss", "expected"), [("cross_entropy", "one of loss"), ("dice_plus", "loss_pixel, loss_dice")]
)
def test_the_best_checkpoint_is_selected_by_a_term_of_the_loss(
    loss: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another name is refused before the first step."""
    settings = (f"loss.name={loss}", "best_by=loss_x", "batch_size=256", "model.options.width=4", "metrics=[]")
    assert here("train", "digits", *settings, "--name", "a", cwd=tmp_path) == EXIT_INPUT
    err = capsys.readouterr().err
    assert "[E_METRIC]" in err
    assert expected in err
    assert not (tmp_path / "runs/a").exists()


@pytest.mark.parametrize(("tf32", "precision"), [(None, "high"), (True, "high"), (False, "highest")])
def test_tf32_of_a_recipe_replaces_the_setting_of_torch_if_there_is_one(tf32: bool | None, precision: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    try:
        transform_model(nn.Linear(2, 2), RecipeStep(tf32=tf32), torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 is (tf32 is not False)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
