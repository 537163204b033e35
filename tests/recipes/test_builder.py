"""Weights, data and metrics of a recipe."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samestep.distributed.world import World
from samestep.errors import DataError, RecipeError
from samestep.metrics.metrics import build_metrics
from samestep.recipes.parameter_groups import freeze
from samestep.recipes.weights import load_matching
from samestep.zoo.digits import load_digits

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


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a.pt"])
def test_weights_are_taken_where_name_and_shape_match(tmp_path: Path, name: str) -> None:
    given, model = net(5), net(3)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    file = saved(tmp_path / name, {**given.state_dict(), "extra": torch.zeros(1)})
    matched = load_matching(model, file)
    assert matched.left_out == (
        "3.weight: (3, 8) here, (5, 8) in the file",
        "3.bias: (3,) here, (5,) in the file",
        "extra: only in the file",
    )
    for key, tensor in model.state_dict().items():
        is_taken = not key.startswith("3.")
        assert (key in matched.taken) == is_taken
        assert torch.equal(tensor, given.state_dict()[key] if is_taken else before[key])


def test_weights_that_are_missing_in_the_file_are_listed(tmp_path: Path) -> None:
    state = net(3).state_dict()
    del state["1.running_mean"]
    matched = load_matching(net(3), saved(tmp_path / "a.pth", dict(state)))
    assert matched.left_out == ("1.running_mean: (2,) here, not in the file",)


def test_names_in_the_file_are_those_of_a_part_of_the_model(tmp_path: Path) -> None:
    encoder, model = net(3), torch.nn.ModuleDict({"encoder": net(3), "decoder": torch.nn.Linear(3, 2)})
    file = saved(tmp_path / "a.pth", {f"module.{name}": tensor for name, tensor in encoder.state_dict().items()})
    with pytest.raises(DataError, match=r"--set model\.pretrained_prefix=encoder\.$"):
        load_matching(model, file)
    loaded = load_matching(model, file, "encoder.")
    assert loaded.taken == tuple(f"encoder.{name}" for name in encoder.state_dict())
    assert loaded.left_out == (
        "decoder.weight: (2, 3) here, not in the file",
        "decoder.bias: (2,) here, not in the file",
    )
    assert all(
        torch.equal(model["encoder"].state_dict()[name], tensor) for name, tensor in encoder.state_dict().items()
    )
    with pytest.raises(DataError, match="rename the tensors"):
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


# --- data and metrics ------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all() -> None:
    first, second = load_digits(shift=0), load_digits(shift=0)
    assert (len(first.train), len(first.evaluation), first.classes) == (1437, 360, tuple("0123456789"))
    everything = [split[index] for split in (first.train, first.evaluation) for index in range(len(split))]
    assert len(everything) == 1797
    for index in (0, 100, 359):
        assert torch.equal(first.evaluation[index][0], second.evaluation[index][0])
    labels = [first.evaluation[index][1] for index in range(360)]
    assert min(labels.count(digit) for digit in range(10)) >= 20


def test_digits_are_moved_by_no_more_than_asked_for() -> None:
    plain, moved = load_digits(shift=0).train, load_digits(shift=1).train
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen = {tuple(moved[0][0].flatten().tolist()) for _ in range(100)}
    allowed = set()
    padded = nn.functional.pad(plain[0][0], (1, 1, 1, 1))
    for top in range(3):
        for left in range(3):
            allowed.add(tuple(padded[:, top : top + 8, left : left + 8].flatten().tolist()))
    assert seen == allowed


def test_metrics_count_each_sample_once_whatever_the_microbatches(alone: World) -> None:
    outputs = torch.tensor([[3.0, 1, 2, 0, 0, 0, -1], [0, 1, 2, 3, 4, 5, 6], [5, 9, 4, 3, 2, 1, 0]])
    targets = torch.tensor([0, 1, 6])
    accuracy, top5 = build_metrics(("accuracy", "top5"), 7)
    for metric in (accuracy, top5):
        for part in (slice(0, 1), slice(1, 3)):
            metric.update(outputs[part], targets[part])
    assert (accuracy.name, accuracy.compute(alone)) == ("accuracy", pytest.approx(1 / 3))
    assert (top5.name, top5.compute(alone)) == ("top5", pytest.approx(1 / 3))
    accuracy.update(outputs[:1], targets[:1])
    assert accuracy.compute(alone) == 1.0, "counts start at zero"


def test_top5_of_fewer_than_five_classes_is_all_of_them(alone: World) -> None:
    (top5,) = build_metrics(("top5",), 3)
    top5.update(torch.eye(3), torch.tensor([1, 2, 0]))
    assert top5.compute(alone) == 1.0


@pytest.mark.parametrize("ignored", [-100, 2, 99])
@pytest.mark.parametrize("shape", [(60,), (60, 9), (60, 3, 5)])
def test_metrics_leave_out_ignored_targets(alone: World, shape: tuple[int, ...], ignored: int) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(shape[0], 8, *shape[1:], generator=generator)
    targets = torch.randint(0, 8, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = ignored
    targets[-1] = ignored
    before = (outputs.clone(), targets.clone())
    accuracy, top5 = build_metrics(("accuracy", "top5"), 8, ignore_index=ignored)
    for metric in (accuracy, top5):
        for start, stop in ((0, 20), (20, 59), (59, 60)):  # of the last one nothing counts
            metric.update(outputs[start:stop], targets[start:stop])
    rows, wanted = outputs.movedim(1, -1).reshape(-1, 8), targets.reshape(-1)
    counting = [number for number, target in enumerate(wanted.tolist()) if target != ignored]
    guesses = [rows[number].argsort(descending=True).tolist() for number in counting]
    for metric, most in ((accuracy, 1), (top5, 5)):
        hits = [int(wanted[number]) in guess[:most] for number, guess in zip(counting, guesses, strict=True)]
        assert 0 < sum(hits) < len(hits)
        assert metric.compute(alone) == pytest.approx(sum(hits) / len(hits), rel=1e-6)
    assert torch.equal(outputs, before[0])
    assert torch.equal(targets, before[1])


def test_metric_that_counted_nothing_is_zero(alone: World) -> None:
    for metric in build_metrics(("accuracy", "top5"), 6):
        metric.update(torch.randn(2, 6, 3), torch.full((2, 3), -100))
        assert metric.compute(alone) == 0.0


def test_unknown_metric_is_refused_before_anything_is_imported() -> None:
    with pytest.raises(RecipeError, match="metric 'f2' is not known") as error:
        build_metrics(("accuracy", "f2"), 3)
    assert error.value.expected == "one of accuracy, dice, f1, iou, perplexity, top5"
