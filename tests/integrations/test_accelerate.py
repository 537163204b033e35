"""Scripts for Accelerate: the bits of Samestep's own loop, exact evaluation, resumption, refusals."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import samestep
from helpers.started import as_torchrun, free_port, python, ranks
from samestep.errors import CheckpointError, InputError
from samestep.integrations.accelerate import Accelerator
from workers import accelerate_training as training

SUPPORTED = ("1.14", "1.15")
SAVED_STEP = 21  # in the second epoch


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Reset the states that Accelerate shares in a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def reference() -> tuple[str, list[list[float]]]:
    """Return hash and evaluation of Samestep's own loop."""
    with samestep.start(device="cpu") as world, torch.random.fork_rng():
        model = training.own_loop(world).eval()
        with torch.no_grad():
            loaders = [DataLoader(training.dataset(n), training.TEST_BATCH) for n in training.TEST_SAMPLES]
            outputs = [model(inputs) for loader in loaders for inputs, _ in loader]
        return training.digest(model), torch.cat(outputs).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3, 5]
)
def test_bits_of_the_own_loop(processes: int, reference: tuple[str, list[list[float]]], tmp_path: Path) -> None:
    assert samestep.launch(training.train, "run", str(tmp_path), 0, processes=processes) == reference


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, pytest.param(1, marks=pytest.mark.long)])
def test_resumes_on_another_number_of_processes(
    processes: int, reference: tuple[str, list[list[float]]], tmp_path: Path
) -> None:
    samestep.launch(training.train, "save", str(tmp_path), SAVED_STEP, processes=2)
    assert samestep.launch(training.train, "load", str(tmp_path), 0, processes=processes) == reference[0]


@pytest.mark.long
def test_adopts_the_process_group_of_accelerate(reference: tuple[str, list[list[float]]], tmp_path: Path) -> None:
    command = python("-m", "workers.accelerate_training")
    with ranks(as_torchrun(free_port()), 2, cwd=tmp_path, command=command) as started:
        results = started.wait()
    assert [result.code for result in results] == [0, 0], results[0].err
    assert {result.out.strip() for result in results} == {reference[0]}


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4},
        {"fsdp_plugin": object()},
        {"deepspeed_plugin": object()},
        {"megatron_lm_plugin": object()},
        {"dynamo_backend": "inductor"},
        {"device_placement": False},
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
        {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_unsupported_options_are_refused(
    options: dict[str, Any], alone: samestep.World, accelerate_state: None
) -> None:
    with pytest.raises(InputError) as error:
        Accelerator(world=alone, **options)
    assert error.value.code == "E_INTEGRATION"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def _two_models(script: training.Script) -> None:
    script.accelerator.prepare(nn.Linear(2, 2))


def _stream(script: training.Script) -> None:
    script.accelerator.prepare(DataLoader(Stream(), batch_size=2))


def _no_update(script: training.Script) -> None:
    for data in script.train:
        script.accelerator.backward(training.cross_entropy(script.model, data))


def _rate_within_a_batch(script: training.Script) -> None:
    for data in script.train:
        script.accelerator.backward(training.cross_entropy(script.model, data))
        script.optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler that is not prepared


def _save_within_a_batch(script: training.Script) -> None:
    for data in script.train:
        script.step(data)
        script.accelerator.save_state("never written")


def _save_before_the_update(script: training.Script) -> None:
    for data in script.train:
        script.accelerator.backward(training.cross_entropy(script.model, data))
        if script.accelerator.sync_gradients:
            script.accelerator.save_state("never written")


def _reduce_in_the_loop(script: training.Script) -> None:
    for data in script.train:
        script.accelerator.reduce(training.cross_entropy(script.model, data))


def _gather_after_an_evaluation(script: training.Script) -> None:
    for _ in script.train:
        script.evaluate()
        script.accelerator.gather(torch.zeros(1))


def _skip(script: training.Script) -> None:
    script.accelerator.skip_first_batches(script.train, 2)


@pytest.mark.parametrize(
    "action",
    [
        *(_two_models, _stream, _no_update, _rate_within_a_batch, _save_within_a_batch, _save_before_the_update),
        *(_reduce_in_the_loop, _gather_after_an_evaluation, _skip),
    ],
)
def test_loops_with_other_results_are_refused(action: Any, alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    with pytest.raises(InputError) as error:
        action(script)
    assert error.value.code == "E_INTEGRATION"


def test_evaluation_in_training_mode_is_refused(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    with pytest.raises(InputError) as error:
        for inputs, _ in script.tests[0]:
            script.model(inputs)
    assert error.value.code == "E_MICROBATCH_LOOP"


def test_counts_divide_the_sum_over_the_batch(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    total = count = 0.0
    for inputs, targets in script.train:
        outputs, counted = script.model(inputs), (targets != 0).sum()
        loss = nn.functional.cross_entropy(outputs, targets, ignore_index=0)
        script.accelerator.backward(loss, count=counted)
        total, count = total + float(loss.detach() * counted), count + int(counted)
        if script.accelerator.sync_gradients:
            break
    result = script.accelerator.step_result
    assert result is not None
    assert result.count == count < training.BATCH
    assert result.loss == pytest.approx(total / count)
    assert result.lr == pytest.approx(0.01)


def test_microbatches_without_items_do_not_count(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    ignored = -100
    for number, (inputs, targets) in enumerate(script.train):
        labels = torch.full_like(targets, ignored) if number == 0 else targets
        loss = nn.functional.cross_entropy(script.model(inputs), labels)
        script.accelerator.backward(loss, count=(labels != ignored).sum())
        if script.accelerator.sync_gradients:
            break
    result = script.accelerator.step_result
    assert result is not None
    assert result.count == training.BATCH * (training.MICROBATCHES - 1) / training.MICROBATCHES
    assert math.isfinite(result.grad_norm)


def test_evaluation_in_the_body_of_a_training_loop(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    for number, data in enumerate(script.train):
        script.step(data)  # which gathers, also after the evaluation of the global batch before
        if script.accelerator.sync_gradients:
            assert len(script.evaluate()) == sum(training.TEST_SAMPLES)
            if number > training.MICROBATCHES:
                break


def _loop_until(script: training.Script, number: int, error: Exception | None = None) -> None:
    for ordinal, data in enumerate(script.train):
        if ordinal == number:
            if error is not None:
                raise error
            break
        script.step(data)


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_training_continues_after_a_loop_that_ended_within_a_batch(
    error: Exception | None, alone: samestep.World, accelerate_state: None, tmp_path: Path
) -> None:
    script = training.Script(world=alone)
    number = training.MICROBATCHES + 3
    with nullcontext() if error is None else pytest.raises(RuntimeError, match="out of memory"):
        _loop_until(script, number, error)
    assert script.accelerator.sync_gradients
    script.accelerator.save_state(str(tmp_path))
    assert script.accelerator.cursor.samples == training.BATCH
    _loop_until(script, training.MICROBATCHES)
    assert script.accelerator.cursor.samples == 2 * training.BATCH


def test_another_model_is_trained_after_an_update_that_failed(alone: samestep.World, accelerate_state: None) -> None:
    accelerator = Accelerator(microbatches=2, world=alone)
    for has_failed in (False, True):
        model, optimizer, _ = training.objects()
        loader = DataLoader(training.dataset(8), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for data in loader:
            accelerator.backward(training.cross_entropy(model, data))
            if has_failed:
                optimizer.step()
        accelerator.free_memory()


def test_trigger_of_a_process_ends_a_loop(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    checks = []
    for data in script.train:
        script.step(data)
        if script.accelerator.sync_gradients:
            if len(checks) == 1:
                script.accelerator.set_trigger()
            checks.append(script.accelerator.check_trigger())
            if checks[-1]:
                break
    assert checks == [False, True]
    assert not script.accelerator.check_trigger()


def test_state_with_another_number_of_loaders_is_refused(
    alone: samestep.World, accelerate_state: None, tmp_path: Path
) -> None:
    script = training.Script(world=alone)
    script.accelerator.save_state(str(tmp_path))
    script.accelerator.prepare(DataLoader(training.dataset(), batch_size=training.BATCH))
    with pytest.raises(CheckpointError) as error:
        script.accelerator.load_state(str(tmp_path))
    assert error.value.code == "E_RESUME_CHANGED"


def test_names_of_accelerate() -> None:
    if not accelerate.__version__.startswith(SUPPORTED):
        pytest.skip(f"accelerate {accelerate.__version__} is not one of the supported {', '.join(SUPPORTED)}")
    assert callable(accelerate.Accelerator._do_sync)
    assert accelerate.Accelerator.accumulate.__wrapped__.__code__.co_names[0] == "_do_sync"
    assert "split_batches" in accelerate.scheduler.AcceleratedScheduler.step.__code__.co_names
