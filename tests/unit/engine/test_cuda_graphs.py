"""Microbatches that are replayed as CUDA graphs have the bits of those computed as usual; graphs are simulated."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from helpers.simulated_graphs import simulated_graphs
from samestep import LossTerm, MultiLoss, cross_entropy, launch
from samestep.config import StepConfig
from samestep.distributed.devices import capture_graph
from samestep.engine import cuda_graphs
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.errors import InputError
from workers import graphs as ranks_graphs
from workers.devices import MovingLSTM
from workers.graphs import CLASSES, SAMPLES, STEPS, Result, train

pytestmark = pytest.mark.filterwarnings("ignore:batch norm computes its statistics")


@pytest.fixture(scope="module")
def world() -> Iterator[samestep.World]:
    with samestep.start(device="cpu") as one:
        yield one


def trained(world: samestep.World, *arguments: Any, **options: Any) -> tuple[Result, int]:
    """Return the result with graphs, which has the bits of that without, and the number of replays."""
    with simulated_graphs() as accelerator:
        usual = train(world, *arguments, **options, cuda_graphs="off")
        assert (usual.used, usual.reason, accelerator.graphs) == (None, None, 0)
        result = train(world, *arguments, **options, cuda_graphs="auto")
        assert result.digest == usual.digest
        return result, accelerator.replays


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["perceptron", "convolutional net", "dropout", "recurrent"])
def test_bits_are_those_without_graphs(world: samestep.World, name: str, microbatches: int) -> None:
    result, replays = trained(world, name, microbatches)
    assert (result.used, result.reason) == (True, None)
    # The second microbatch after the first step is recorded; replays begin in the next step.
    assert replays == microbatches * (STEPS - (3 if microbatches == 1 else 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"reduction": "fast", "merge": "off"},
        {"engine_options": {"metrics": ["accuracy"]}},
        {"engine_options": {"ema": 0.9}},
        {"loss": nn.CrossEntropyLoss(reduction="sum")},
        {"loss": cross_entropy},
    ],
)
def test_options_keep_the_bits(world: samestep.World, options: dict[str, Any]) -> None:
    result, replays = trained(world, "convolutional net", **options)
    assert (result.used, replays) == (True, 4 * (STEPS - 2))


def test_a_graph_that_needs_more_memory_than_is_free_is_not_recorded(world: samestep.World) -> None:
    with simulated_graphs() as accelerator:
        accelerator.free = 2**19
        result = train(world, "perceptron", cuda_graphs="auto")
    assert (result.used, accelerator.graphs) == (False, 0)
    assert result.reason == "a graph needs 1 MiB, and 512 KiB are free"


def test_a_short_batch_is_computed_as_usual_and_two_sizes_have_a_graph_each(world: samestep.World) -> None:
    result, replays = trained(world, "dropout", 4, samples=(16, 16, 7, 16, 7, 5, 16))
    assert result.used
    # In the last two of four batches of 16, all microbatches; the batches of 7 have sizes 2 and 1.
    assert replays == 4 + 4 + 3


def test_a_witness_excludes_graphs(world: samestep.World) -> None:
    result, replays = trained(world, "dropout", engine_options={"callbacks": [samestep.Witness(2)]})
    assert (result.used, replays) == (False, 0)


def _changes(engine: Engine, step: int) -> None:
    """Change numbers that the forward reads, modes of modules and the memory of a parameter between steps."""
    model: Any = engine.model
    if step == 4:
        model.net[3].p = 0.7
    if step == 7:
        model.net[1].eval()
    if step == 10:
        with torch.no_grad():
            model.head.weight.data = model.head.weight.data.clone()


def test_changes_between_steps_have_an_effect(world: samestep.World) -> None:
    result, replays = trained(world, "convolutional net", before_step=_changes, samples=(SAMPLES,) * 13)
    assert result.used
    assert replays == 4 * 2 + 3 * 4 * 2  # after each change, microbatches are recorded again in its first step


class Planted(nn.Module):
    """A perceptron whose forward does something else too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.calls = nn.Linear(8, CLASSES), kind, 0
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(values.float())
        match self.kind:
            case "wait":
                return outputs if outputs.sum().item() > 0 else outputs * 2
            case "host":
                return outputs * (1.0 + random.random())
            case "counter":
                self.calls += 1
            case "buffer":
                self.mean = 0.9 * self.mean + outputs.detach().mean(0)
        return outputs


PLANTED = {
    "wait": "a rehearsal raised RuntimeError: called a synchronizing CUDA operation",
    "host": "the forward draws random numbers on the host",
    "counter": "the forward changes attributes of modules",
    "buffer": "the forward replaces buffers",
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_model_that_cannot_be_replayed_is_computed_as_usual(world: samestep.World, kind: str) -> None:
    result, _ = trained(world, lambda: Planted(kind))
    assert (result.used, result.reason) == (False, PLANTED[kind])


@pytest.mark.parametrize("kind", PLANTED)
def test_a_model_that_cannot_be_replayed_is_refused_with_on(world: samestep.World, kind: str) -> None:
    with simulated_graphs(), pytest.raises(InputError, match=PLANTED[kind]) as refusal:
        train(world, lambda: Planted(kind), cuda_graphs="on")
    assert refusal.value.code == "E_INCOMPATIBLE"


def _hook(engine: Engine) -> None:
    engine.model.get_submodule("head").register_forward_hook(lambda *call: None)


def _parameter_hook(engine: Engine) -> None:
    engine.model.get_parameter("head.weight").register_hook(lambda gradient: None)


class Begins(Callback):
    def begin_microbatch(self, microbatch: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prepare": _hook}, "the module 'head' has hooks"),
        ({"prepare": _parameter_hook}, "the parameter head.weight has hooks"),
        ({"engine_options": {"callbacks": [Begins()]}}, "a callback at the beginning of each microbatch"),
        ({"forward": lambda model, pair: nn.functional.cross_entropy(model(pair[0]), pair[1])}, "a forward function"),
        (
            {"loss": MultiLoss([LossTerm(name, nn.functional.cross_entropy) for name in "ab"])},
            "a loss of several terms",
        ),
    ],
)
def test_hooks_callbacks_and_losses_exclude_graphs(world: samestep.World, options: dict[str, Any], reason: str) -> None:
    result, replays = trained(world, "convolutional net", **options)
    assert (result.used, result.reason, replays) == (False, reason, 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recompute": ("net",)}, "step.recompute"),
        ({"batch_norm": "sync"}, "step.batch_norm: sync"),
        ({"gather": "global"}, "step.gather: global"),
        ({"reduction": "fast"}, "step.merge: auto"),
    ],
)
def test_options_exclude_graphs(
    world: samestep.World, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(cuda_graphs, "is_accelerator", lambda device: True)
    result = train(world, "convolutional net", samples=(SAMPLES,), cuda_graphs="auto", **options)
    assert (result.used, result.reason) == (False, reason)
    with pytest.raises(InputError, match=reason) as refusal:
        train(world, "convolutional net", samples=(SAMPLES,), cuda_graphs="on", **options)
    assert refusal.value.code == "E_INCOMPATIBLE"


def test_without_a_gpu_auto_computes_as_usual_and_on_is_refused(world: samestep.World) -> None:
    usual = train(world, "perceptron", cuda_graphs="off")
    assert train(world, "perceptron", cuda_graphs="auto") == Result(usual.digest, False, "device cpu")
    with pytest.raises(InputError) as refusal:
        train(world, "perceptron", cuda_graphs="on")
    assert refusal.value.code == "E_INCOMPATIBLE"


def test_the_default_is_off() -> None:
    assert StepConfig().cuda_graphs == "off"


@pytest.mark.parametrize("result", ["outputs", "loss", "gradients", "buffers"])
def test_a_planted_difference_is_detected(world: samestep.World, monkeypatch: pytest.MonkeyPatch, result: str) -> None:
    def capture(device: torch.device, compute: Any) -> Any:
        replay, results = capture_graph(device, compute)
        changed = {
            "outputs": results.outputs,
            "loss": results.loss.sum,
            "gradients": results.gradients[1],
            "buffers": next(model.buffers()),
        }[result]

        def replay_with_a_difference() -> None:
            replay()
            changed.view(-1)[0].mul_(1 + 2**-22)

        return replay_with_a_difference, results

    model = ranks_graphs.ConvolutionalNet()
    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    trained_result, _ = trained(world, lambda: model.apply(_reset))
    names = {"gradients": "gradient of net.0.bias"}
    assert (trained_result.used, trained_result.reason) == (False, f"other bits of {names.get(result, result)}")


def _reset(module: Any) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


class FailsInRecording(nn.Linear):
    """A layer with an operation that only a recording refuses."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if torch.get_device_module().is_recording:
            raise RuntimeError("operation not permitted")
        return super().forward(values.float())


def test_a_failed_recording_ends_the_run(world: samestep.World) -> None:
    with simulated_graphs(), pytest.raises(InputError, match="the recording raised RuntimeError") as refusal:
        train(world, lambda: FailsInRecording(8, CLASSES), cuda_graphs="auto")
    assert refusal.value.code == "E_INCOMPATIBLE"


@pytest.mark.slow
def test_bits_are_equal_under_ddp(world: samestep.World) -> None:
    expected = train(world, "batch norm", 8, cuda_graphs="off").digest
    ranks = launch(ranks_graphs.run, "batch norm", "ddp", "on", processes=2)
    # The backward of the last of four microbatches reduces gradients, and is computed as usual.
    assert ranks == 2 * [[expected, True, None, 3 * (STEPS - 2)]]


@pytest.mark.slow
def test_divided_models_have_no_graphs() -> None:
    for _, *rest in launch(ranks_graphs.run, "perceptron", "fsdp", "auto", processes=2):
        assert rest == [False, "strategy fsdp", 0]


def test_a_recording_leaves_the_parameters_of_recurrent_layers_in_their_memory() -> None:
    model = MovingLSTM(3, 4)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with cuda_graphs._aliases(model, list(model.parameters())):
        model(torch.randn(2, 5, 3))
    model(torch.randn(2, 5, 3))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
