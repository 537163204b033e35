"""Steps and evaluations of recipes beside a plain loop: bits, parts, averages and batch norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from helpers.system import events, here
from samestep.config import RunOptions
from samestep.distributed.rng import derive_seed, seed_generators
from samestep.distributed.world import World
from samestep.errors import EXIT_DONE, EXIT_INPUT, NonFiniteError
from samestep.recipes.builder import Built, build
from samestep.recipes.predict import evaluated
from samestep.recipes.recipe_files import load_recipe, read_recipe
from samestep.recipes.training_step import AveragedWeights

SMALL = ("data.options.shift=0", "model.options.width=4", "batch_size=128", "optimizer.options.lr=0.1")

FUSED = ("optimizer.options.fused=true",)
ADAMW = ("optimizer.name=adamw", "optimizer.options={lr: 0.01, fused: true}")


def built(world: World, *overrides: str) -> Built:
    return build(load_recipe("digits", [*SMALL, *overrides]), RunOptions(workers=0), world)


def weights(made: Built) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.driver.model.parameters()]


def momenta(made: Built) -> dict[tuple[int, str], torch.Tensor]:
    states = enumerate(made.driver.optimizer.state.values())
    return {(number, name): value.clone() for number, state in states for name, value in state.items()}


@pytest.mark.parametrize("options", [(), FUSED, ADAMW], ids=["plain", "fused", "fused adamw"])
def test_steps_have_the_bits_of_a_plain_loop(alone: World, options: tuple[str, ...]) -> None:
    made = built(alone, *options)
    other = built(alone, *options)
    other.driver.optimizer.state.clear()  # without momentum before the first step
    optimizer = other.driver.optimizer
    model = other.driver.model
    for number, (batch, same) in enumerate(zip(made.train, other.train, strict=True)):
        result = made.driver.step(batch)
        seed_generators(derive_seed("shard", 0, number, 0))
        inputs, targets = same.data
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        other.driver.scheduler.step()
        assert result.loss == float(loss.detach())
    assert all(map(torch.equal, weights(made), weights(other)))
    values = evaluated(made, made.metrics)
    model.eval()
    data = [batch.data for batch in other.evaluation]
    inputs, targets = (torch.cat(column) for column in zip(*data, strict=True))
    with torch.no_grad():
        outputs = model(inputs)
    assert values["samples"] == len(targets) == 360
    assert values["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert values["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)), rel=1e-5)


def test_parts_have_the_gradient_of_the_whole_batch(alone: World) -> None:
    norms = []
    for parts in (1, 3):
        made = built(alone, "model.options.dropout=0", f"accumulate={parts}")
        norms.append(made.driver.step(next(iter(made.train))).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.5)  # batch norm uses the statistics of a part
    assert norms[0] != norms[1]


@pytest.mark.parametrize("options", [(), FUSED, ADAMW], ids=["plain", "fused", "fused adamw"])
@pytest.mark.parametrize("reaction", ["stop", "skip"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_sample_that_is_not_finite_is_named_or_skipped(
    alone: World, reaction: str, options: tuple[str, ...], steps: int
) -> None:
    made = built(alone, f"step.non_finite={reaction}", *options)
    batches = iter(made.train)
    for _ in range(steps):
        assert not made.driver.step(next(batches)).skipped
    batch = next(batches)
    batch.data[0][5] = float("nan")
    before = weights(made)
    states = momenta(made)
    buffers = [buffer.clone() for buffer in made.driver.model.buffers()]
    if reaction == "stop":
        with pytest.raises(NonFiniteError, match=f"is not finite, from sample {int(batch.samples[5])} ") as error:
            made.driver.step(batch)
        assert error.value.code == "E_NONFINITE"
    else:
        assert made.driver.step(batch).skipped
        assert all(map(torch.equal, buffers, made.driver.model.buffers()))
    assert all(map(torch.equal, before, weights(made)))
    assert momenta(made).keys() >= states.keys()
    # A fused AdamW makes its state in a step that is skipped.
    assert all(
        torch.equal(value, states.get(key, torch.zeros(()).expand_as(value))) for key, value in momenta(made).items()
    )


def test_overflows_of_half_precision_are_skipped_and_reduce_the_scale(alone: World) -> None:
    found = []
    for options in ((), FUSED):
        made = built(alone, "step.precision=fp16", *options)
        made.driver.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        results = [made.driver.step(batch).skipped for batch in made.train]
        found.append((results, made.driver.scaler.get_scale()))
    assert found[0] == found[1]
    skipped, scale = found[0]
    assert skipped[0]
    assert not all(skipped)
    assert scale == 2.0 ** (20 - sum(skipped))


@pytest.mark.parametrize(("options", "kernel"), [(FUSED, "_fused_sgd_"), (ADAMW, "_fused_adamw_")])
def test_nothing_is_read_before_a_fused_update(alone: World, options: tuple[str, ...], kernel: str) -> None:
    made = built(alone, *options, "step.clip_norm=1")
    batches = iter(made.train)
    made.driver.step(next(batches))
    batch = next(batches)
    batch.samples.tolist()  # indices of the samples are on the host
    with Functions() as functions:
        made.driver.step(batch)
    update = functions.names.index(kernel)
    forward = functions.names.index("conv2d")
    reads = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"}
    assert not reads.intersection(functions.names[forward:update])
    assert "tolist" in functions.names[update:]


def test_a_fused_sgd_accepts_a_first_gradient_after_the_first_step(alone: World) -> None:
    made = built(alone, *FUSED)
    optimizer = made.driver.optimizer
    first, second = optimizer.param_groups[0]["params"][:2]
    before = second.detach().clone()
    first.grad = torch.ones_like(first)
    optimizer.step()
    second.grad = torch.ones_like(second)
    optimizer.step()
    group = optimizer.param_groups[0]
    assert torch.allclose(second, before - group["lr"] * (1 + group["weight_decay"] * before))


class Functions(TorchFunctionMode):
    """Names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*arguments, **(options or {}))


DECAY = 0.8


def test_average_equals_that_of_torch() -> None:
    """The decay increases during the first steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    decays = iter([2 / 11, 3 / 12, 4 / 13, 5 / 14])

    def move(average: list[torch.Tensor], weights: list[torch.Tensor], count: int) -> None:
        get_ema_multi_avg_fn(next(decays))(average, weights, count)

    reference = AveragedModel(model, multi_avg_fn=move)
    reference.update_parameters(model)  # its first update is a copy
    for step in range(1, 5):
        with torch.no_grad():
            model.weight.add_(0.1 * step)
        averaged.update(step)
        reference.update_parameters(model)
    expected = dict(reference.module.named_parameters())
    assert averaged.tensors.keys() == expected.keys()
    for name, average in averaged.tensors.items():
        assert torch.equal(average, expected[name]), name
    assert not torch.equal(averaged.tensors["weight"], model.weight)


def test_later_steps_use_the_configured_decay() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    before = averaged.tensors["weight"].clone()
    with torch.no_grad():
        model.weight.fill_(5.0)
    averaged.update(1000)
    assert torch.allclose(averaged.tensors["weight"], DECAY * before + (1 - DECAY) * 5)


def test_the_average_is_in_place_for_a_block_alone() -> None:
    model = torch.nn.Linear(2, 1)
    averaged = AveragedWeights(dict(model.named_parameters()), DECAY)
    with torch.no_grad():
        model.weight.fill_(3.0)
    before = model.weight.clone()
    with averaged.in_place():
        assert torch.equal(model.weight, averaged.tensors["weight"])
    assert torch.equal(model.weight, before)


RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"  # 102 samples, and a model with batch norm
AUTO = ("microbatches=auto", "batch_size=16", "epochs=1")


def train(folder: Path, name: str, *settings: str, processes: object = 1) -> tuple[int, Path]:
    code = here("train", RECIPE, "--name", name, "--processes", processes, *AUTO, *settings, cwd=folder)
    return code, folder / "runs" / name


def notes(run: Path) -> str:
    return "\n".join(event["text"] for event in events(run, "note"))


@pytest.mark.slow
def test_auto_is_resolved_before_ranks_start(tmp_path: Path) -> None:
    code, run = train(tmp_path, "a", processes=2)
    assert code == EXIT_DONE
    assert read_recipe(run / "recipe.yaml").microbatches == 8
    assert notes(run) == ""
    assert here("eval", run, cwd=tmp_path) == EXIT_DONE


def test_more_processes_are_refused_with_ways_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run = train(tmp_path, "a", "microbatches=2", processes=3)
    err = capsys.readouterr().err
    assert (code, run.exists()) == (EXIT_INPUT, False)
    assert "[E_TOO_MANY_RANKS]" in err
    for way_out in ("--processes 2;", "microbatches=3 or more"):
        assert way_out in err


@pytest.mark.parametrize(
    ("settings", "steps", "note"),
    [
        (("data.options.samples=33",), 2, "the last batch of an epoch has 1 sample"),
        pytest.param(("data.options.samples=34",), 3, "", marks=pytest.mark.long),
        pytest.param(("data.options.samples=34", "data.drop_last=true"), 2, "", marks=pytest.mark.slow),
    ],
)
def test_last_batch(tmp_path: Path, settings: tuple[str, ...], steps: int, note: str) -> None:
    code, run = train(tmp_path, "a", *settings)
    assert code == EXIT_DONE
    assert len(events(run, "step")) == steps
    assert notes(run).startswith(note)
    assert bool(notes(run)) == bool(note)
