"""Scripts for Accelerate: the bits of Samestep's own loop, exact evaluation, resumption, refusals."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
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


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.long)])
def test_values_do_not_depend_on_processes(processes: int) -> None:
    values = samestep.launch(training.values, processes=processes)
    model, _, _ = training.objects()
    inputs, targets = training.dataset(training.TEST_SAMPLES[0]).tensors
    steps, batches = -(-training.SAMPLES // training.BATCH), -(-training.TEST_SAMPLES[0] // training.TEST_BATCH)
    assert values["threads"] == training.THREADS
    assert values["lengths"] == [steps, batches] * 3
    rows = zip(inputs.tolist(), targets.tolist(), strict=True)
    assert values["lists"] == [
        [[f"label {label}"], row, row[: 1 + label], label, row[: 1 + label]] for row, label in rows
    ]
    assert values["buffers"] == [training.digest(model)]
    # One microbatch of each process is the body with the evaluation.
    number = training.SHORT_BATCH_MICROBATCHES
    assert values["losses"] == [number - processes, number, 0]


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


def _schedule_per_microbatch(script: training.Script) -> None:
    # The rate changes between two global batches.
    scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer.optimizer, training.MICROBATCHES)
    for number, data in enumerate(script.train):
        script.step(data)
        if number >= training.MICROBATCHES:
            scheduler.step()


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


def _collective_after_an_evaluation(name: str) -> Any:
    def action(script: training.Script) -> None:
        script.evaluate()
        getattr(script.accelerator, name)(torch.zeros(1))

    return action


def _gather_within_an_evaluation(value: Any) -> Any:
    def action(script: training.Script) -> None:
        script.model.eval()
        for _ in script.tests[0]:
            script.accelerator.gather_for_metrics(value)

    return action


def _load_in_the_loop(script: training.Script) -> None:
    for _ in script.train:
        script.accelerator.load_state("never read")


def _accumulate(script: training.Script) -> None:
    script.accelerator.gradient_accumulation_steps = 4


def _place(name: str) -> Any:
    def action(script: training.Script) -> None:
        value = script.model if name == "model" else DataLoader(training.dataset(), training.BATCH)
        script.accelerator.prepare(value, device_placement=[False])

    return action


def _evaluate_with(**options: Any) -> Any:
    def action(script: training.Script) -> None:
        loader = script.accelerator.prepare(DataLoader(training.dataset(), training.TEST_BATCH, **options))
        script.model.eval()
        next(iter(loader))

    return action


def _skip(script: training.Script) -> None:
    script.accelerator.skip_first_batches(script.train, 2)


@pytest.mark.parametrize(
    "action",
    [
        *(_two_models, _stream, _no_update, _rate_within_a_batch, _save_within_a_batch, _save_before_the_update),
        *(_reduce_in_the_loop, _gather_after_an_evaluation, _skip, _schedule_per_microbatch),
        *(_load_in_the_loop, _accumulate, _place("model"), _place("loader")),
        *map(_collective_after_an_evaluation, ("gather", "gather_for_metrics", "reduce")),
        *(_gather_within_an_evaluation([torch.zeros(1)]), _gather_within_an_evaluation(numpy.zeros(1))),
        _evaluate_with(num_workers=1, timeout=30),
        _evaluate_with(num_workers=1, multiprocessing_context="spawn"),
        _evaluate_with(num_workers=1, in_order=False),
    ],
)
def test_loops_with_other_results_are_refused(action: Any, alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    with pytest.raises(InputError) as error:
        action(script)
    assert error.value.code == "E_INTEGRATION"


def test_length_of_loaders_in_evaluation_mode(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    assert training.MICROBATCHES > 2  # samples of a batch of an evaluation
    assert len(script.accelerator.prepare(DataLoader(training.dataset(5), batch_size=2))) == 3
    script = training.Script(world=alone, global_batch_size=2 * training.BATCH)
    script.model.eval()  # as of a pretrained model
    assert len(script.train) == -(-training.SAMPLES // (2 * training.BATCH))
    batches = -(-training.TEST_SAMPLES[0] // training.TEST_BATCH)
    for _ in script.tests[0]:
        assert len(script.tests[0]) == batches
    assert len(script.tests[0]) == batches


def test_evaluation_that_changes_parameters_is_refused(alone: samestep.World, accelerate_state: None) -> None:
    accelerator = Accelerator(world=alone)
    loader = DataLoader(torch.arange(4), batch_size=2)
    model, loader = accelerator.prepare(nn.Embedding(4, 2, max_norm=0.1).eval(), loader)
    with pytest.raises(InputError) as error:
        for numbers in loader:
            model(numbers)
    assert error.value.code == "E_BUFFER"


def test_evaluation_in_training_mode_is_refused(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    with pytest.raises(InputError) as error:
        for inputs, _ in script.tests[0]:
            script.model(inputs)
    assert error.value.code == "E_MICROBATCH_LOOP"


def test_counts_divide_the_sum_over_the_batch(alone: samestep.World, accelerate_state: None) -> None:
    script = training.Script(world=alone)
    total = count = 0.0
    for number, (inputs, targets) in enumerate(script.train):
        labels = torch.zeros_like(targets) if number == 0 else targets  # a microbatch without items
        outputs, counted = script.model(inputs), (labels != 0).sum()
        loss = nn.functional.cross_entropy(outputs, labels, ignore_index=0)
        script.accelerator.backward(loss, count=counted)
        total, count = total + (float(loss.detach() * counted) if counted else 0.0), count + int(counted)
        if script.accelerator.sync_gradients:
            break
    result = script.accelerator.step_result
    assert result is not None
    assert result.count == count < training.BATCH
    assert result.loss == pytest.approx(total / count)
    assert result.lr == pytest.approx(0.01)
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


def _batch(script: training.Script) -> None:
    """Compute one step."""
    for data in script.train:
        script.step(data)
        if script.accelerator.sync_gradients:
            return


def test_first_state_resets_the_position(alone: samestep.World, accelerate_state: None, tmp_path: Path) -> None:
    script = training.Script(world=alone)
    script.accelerator.save_state(str(tmp_path))
    _batch(script)
    assert script.accelerator.cursor.samples == training.BATCH
    for data in script.train:
        script.accelerator.backward(training.cross_entropy(script.model, data))
        if script.accelerator.sync_gradients:
            break  # without an update
    script.accelerator.load_state(str(tmp_path))
    assert script.accelerator.cursor.samples == 0
    _batch(script)
    assert script.accelerator.cursor.samples == training.BATCH
    assert script.accelerator.step_result is not None
    assert script.accelerator.step_result.step == 1


def test_objects_are_prepared_again_after_free_memory(
    alone: samestep.World, accelerate_state: None, tmp_path: Path
) -> None:
    script = training.Script(world=alone)
    _batch(script)
    assert script.accelerator.gather(torch.ones(2)).tolist() == [1, 1]  # before an evaluation
    assert script.accelerator.reduce(torch.ones(2)).tolist() == [1, 1]
    script.accelerator.save_state(str(tmp_path))
    script.accelerator.free_memory()
    prepared = script.model, script.optimizer, script.train, script.scheduler, *script.tests
    assert script.accelerator.prepare(*prepared)[2] is script.train
    script.accelerator.load_state(str(tmp_path))  # the loaders are those of the checkpoint
    script.accelerator.free_memory()
    script.accelerator.prepare(*prepared)
    _batch(script)
    assert script.accelerator.step_result is not None
    assert script.accelerator.step_result.step == 1
    assert script.accelerator.step_result.lr > 0
    assert script.accelerator.cursor.samples == 2 * training.BATCH


def test_optimizer_without_a_rate(alone: samestep.World, accelerate_state: None) -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    accelerator = Accelerator(microbatches=2, world=alone)
    model, _, _ = training.objects()
    loader = DataLoader(training.dataset(8), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, adafactor(model.parameters()), loader)
    for data in loader:
        accelerator.backward(training.cross_entropy(model, data))
        optimizer.step()
    assert accelerator.step_result is not None
    assert accelerator.step_result.lr == 0


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
