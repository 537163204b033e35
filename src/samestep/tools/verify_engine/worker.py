"""Worker process of a trial: runs the subject as one rank and records every stage of the engine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import torch
from torch.nn.modules.batchnorm import _NormBase

from samestep.checkpoint.contents import Progress
from samestep.checkpoint.state import load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions, StepConfig
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.interception import intercept_collectives
from samestep.distributed.rng import generator_state, preserved_generators
from samestep.engine.callbacks import Intervention
from samestep.engine.consistency import optimizer_tensors
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss, LossFunction, as_step_loss
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.nested_data import has_rows, rows
from samestep.engine.step_stats import StepResult
from samestep.errors import EXIT_FAILED
from samestep.launcher.job import process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.microbatches import Cursor
from samestep.session import start
from samestep.tools.verify_engine.interventions import EngineInterventions, StateValue, apply_to_process, hidden_state
from samestep.tools.verify_engine.tensor_comparison import StepTensors, digest_any, digest_rows
from samestep.tools.verify_engine.trials import Subject, Trial

if TYPE_CHECKING:
    from samestep.recipes.builder import Built

# Far above the rounding of a float32 sum, far below the effect of a wrong divisor.
_TOLERANCE = 1e-4


@dataclass
class _Forward:
    """Modules with digests of their outputs, and the number of collectives, in the forward of a microbatch."""

    modules: list[tuple[str, str]] = field(default_factory=list)
    collectives: int = 0


class Probe(Intervention):
    """Callback that writes one line of JSON per event and applies interventions.

    Attributes:
        last_event: time of the last event, in seconds of the monotonic clock.
        is_stopped: the run ended after a step because of a stop request.
    """

    def __init__(self, trial: Trial, rank: int, size: int, file: TextIO, *, ends_script: bool = False) -> None:
        self._trial, self._rank, self._size, self._file = trial, rank, size, file
        self._max_steps = trial.steps if ends_script else None
        self._interventions = EngineInterventions(trial.interventions)
        self._tensors = StepTensors(trial, rank)
        self._step: dict[str, Any] = {}
        self._microbatches: dict[int, dict[str, Any]] = {}
        self._outputs: dict[int, tuple[Microbatch, Any]] = {}
        self._hidden_state: dict[str, str] = {}
        # By thread, between the begin and the end of a microbatch.
        self._forwards: dict[int, _Forward] = {}
        intercept_collectives(lambda: threading.get_ident() in self._forwards, self._count_collective)
        self.last_event = time.monotonic()
        self.is_stopped = False
        self._records = False  # the current step

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write one line, and flush the file: a killed rank leaves the lines of all earlier events."""
        self.last_event = time.monotonic()
        self._file.write(json.dumps({"kind": kind, **facts}, default=str) + "\n")
        self._file.flush()

    def prepare(self, model: torch.nn.Module, config: StepConfig) -> StepConfig:
        config = self._interventions.prepare(model, config)
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self._record_output, name))
        return config

    def engine_created(self, engine: Engine) -> None:
        world, modules = engine.world, dict(engine.model.named_modules())
        is_gpu = is_accelerator(world.device)
        self.write(
            "engine",
            {
                "device": accelerator_module().get_device_name(world.device) if is_gpu else "cpu",
                "config": asdict(engine.config),
                "modules": {name: type(module).__name__ for name, module in modules.items()},
                "parameters": [name for name, _ in engine.model.named_parameters()],
                "norms": [name for name, module in modules.items() if isinstance(module, _NormBase)],
                "averaged": sorted(self._interventions.averaged),
            },
        )

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if self._max_steps is not None and engine.steps >= self._max_steps:
            self._end_subject(engine)
        self._records = engine.steps >= self._trial.after
        if not self._records:
            return
        self._interventions.begin_step(engine)
        self._microbatches, self._outputs = {}, {}
        self._hidden_state = _state_digests(hidden_state(engine.model, self._interventions.averaged))
        self._step = {
            "step": engine.steps + 1,
            "ends_epoch": batch.end.epoch > batch.begin.epoch,
            "order": [int(index) for index in batch.indices],
            "microbatches_of_batch": batch.microbatches,
            "rates": [float(group["lr"]) for group in engine.optimizer.param_groups],
            "settings": [_settings(group) for group in engine.optimizer.param_groups],
            "threads": torch.get_num_threads(),
            "before": _state_digests(_model_state(engine)),
        }

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        if not self._records:
            return
        if self._trial.kill_at == self._step["step"] and self._rank == self._size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._interventions.begin_microbatch(self._step["step"], microbatch)
        self._forwards[threading.get_ident()] = _Forward()

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        if not self._records:
            return
        self._outputs[microbatch.number] = (microbatch, outputs)
        self._microbatches[microbatch.number] = {
            "inputs": digest_any(microbatch.data[0]),
            "targets": digest_any(microbatch.data[1]),
            "rows": digest_rows(microbatch.data[0], microbatch.size),
            **vars(self._forwards.pop(threading.get_ident(), _Forward())),
            "outputs": digest_any(outputs),
            "sum": float(loss.sum.detach()),
            "count": float(loss.count),
        }

    def end_gradients(self, engine: Engine) -> None:
        if not self._records:
            return
        local = {(name, ""): p.grad for name, p in engine.local_parameters.local.items() if p.grad is not None}
        gradients = _full_tensors(engine, local)
        self._step["gradients"] = _state_digests(gradients)
        self._tensors.add("gradients", gradients)

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if self._records:
            self._record_step(engine, result)
        if result.stop:
            self.is_stopped = True
            self._end_subject(engine)

    def _record_step(self, engine: Engine, result: StepResult) -> None:
        state = _model_state(engine)
        optimizer = _full_tensors(engine, optimizer_tensors(engine.local_parameters.local, engine.optimizer))
        hidden = _state_digests(hidden_state(engine.model, self._interventions.averaged))
        self._tensors.add("outputs", {str(number): outputs for number, (_, outputs) in self._outputs.items()})
        self._tensors.add("state", state)
        self._tensors.add("optimizer", optimizer)
        self.write(
            "step",
            {
                **self._step,
                "microbatches": self._microbatches,
                "loss": result.loss,
                "count": result.count,
                "grad_norm": result.grad_norm,
                "after": _state_digests(state),
                "optimizer": _state_digests(optimizer),
                "changed_state": [name for name, value in hidden.items() if self._hidden_state.get(name) != value],
                "distances": self._tensors.end_step(result.step),
            },
        )
        if self._trial.checks_additivity and engine.loss is not None and engine.config.gather == "microbatch":
            with preserved_generators(engine.world.device):
                for microbatch, outputs in self._outputs.values():
                    if outputs is None:  # of a forward function
                        continue
                    check = check_additivity(engine.loss, outputs, microbatch)
                    self.write("additivity", {"step": result.step, **check})

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        state = _state_digests(_model_state(engine))
        valid = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self.write("evaluation", {"values": valid, "before": state})

    def _end_subject(self, engine: Engine) -> NoReturn:
        engine.world.barrier()  # no rank ends while another needs it
        raise EndOfScript

    def _count_collective(self, is_blocking: bool) -> None:
        self._forwards[threading.get_ident()].collectives += 1

    def _record_output(self, name: str, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        forward = self._forwards.get(threading.get_ident())
        if forward is not None and torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():  # not a read of values by the model
                forward.modules.append((name, digest_any(outputs)))


def check_additivity(loss: LossFunction | MultiLoss, outputs: Any, microbatch: Microbatch) -> dict[str, Any]:
    """Split outputs and targets of a microbatch at several positions and compare the loss with that of the pieces.

    The model is not called, so neither batch norm nor dropout can affect the comparison.

    Returns:
        `checked`: whether outputs and targets can be split; `cuts`: positions at which the pieces do not add up;
        `repeats`: false if a second call has another value.
    """
    targets, size = microbatch.data[1], microbatch.size
    step_loss, cuts = as_step_loss(loss), []
    unchecked = {"checked": False, "microbatch": microbatch.number, "cuts": []}
    if size < 2 or not (has_rows(outputs, size) and has_rows(targets, size)):
        return unchecked
    with torch.no_grad(), preserved_generators():
        whole = step_loss.term_losses(outputs, targets, size)
    with torch.no_grad():
        before = generator_state()
        again = step_loss.term_losses(outputs, targets, size)
        if [float(term.sum) for term in whole] != [float(term.sum) for term in again]:
            return {**unchecked, "repeats": False}
        is_random = generator_state() != before  # pieces draw other numbers
        if is_random:
            return unchecked
        for position in sorted({1, size // 3 or 1, size // 2}):
            pieces = [
                step_loss.term_losses(rows(outputs, size, *piece), rows(targets, size, *piece), piece[1] - piece[0])
                for piece in ((0, position), (position, size))
            ]
            compared = [_compare_pieces(*terms) for terms in zip(whole, *pieces, strict=True)]
            cuts += [{"at": position, **cut} for cut in compared if cut is not None]
    return {"checked": True, "microbatch": microbatch.number, "size": size, "cuts": cuts}


def _compare_pieces(whole: Loss, first: Loss, rest: Loss) -> dict[str, Any] | None:
    """Return sums, counts and means if those of the pieces do not add up to those of the whole."""
    total, count = float(whole.sum), float(whole.count)
    totals, counts = float(first.sum) + float(rest.sum), float(first.count) + float(rest.count)
    if _is_close(totals, total) and _is_close(counts, count):
        return None
    means = [float(loss.sum) / float(loss.count) if float(loss.count) else 0.0 for loss in (whole, first, rest)]
    return {"sum": total, "sum_of_pieces": totals, "count": count, "count_of_pieces": counts, "means": means}


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))


def _model_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's checkpoint: parameters and persistent buffers. A collective."""
    state: dict[str, torch.Tensor] = dict(engine.model.named_parameters())
    for path, module in engine.model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                state[f"{path}.{key}" if path else key] = buffer
    parameters = engine.local_parameters
    return state | {name: parameters.full_tensor(name, p.detach()) for name, p in parameters.local.items()}


def _full_tensors(engine: Engine, local: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return full tensors by `name/slot`, or by name for an empty slot, from the parts of each rank. A collective."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for (name, slot), value in local.items():
        by_name.setdefault(name, {})[slot] = value
    parameters = engine.local_parameters
    return {
        f"{name}/{slot}" if slot else name: parameters.full_tensor(name, value)
        for name, slots in parameters.merge_metadata(by_name).items()
        for slot, value in slots.items()
    }


def _state_digests(state: Mapping[str, StateValue]) -> dict[str, str]:
    return {name: digest_any(value) for name, value in state.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, except for its learning rate; a checkpoint turns tuples into lists."""
    numbers = {key: value for key, value in group.items() if isinstance(value, float | int | tuple | list)}
    return {key: value for key, value in numbers.items() if key not in ("params", "lr", "initial_lr")}


def run(subject: Subject, trial: Trial) -> bool:
    """Run the subject as one rank and record its results; return whether it ended because of a stop request."""
    rank, size = rank_and_size()
    apply_to_process(trial.interventions, trial.folder, rank)
    with (trial.folder / f"rank-{rank}.jsonl").open("a") as file:
        probe = Probe(trial, rank, size, file, ends_script=subject.script is not None)
        process_state.is_experiment = True
        process_state.callbacks.append(probe)
        _watch_progress(probe, trial.patience)
        with contextlib.suppress(EndOfScript):
            if subject.recipe is not None:
                _run_recipe(subject.recipe, trial)
            else:
                _run_script(subject, trial, trial.folder / f"output-{rank}.log")
        process_state.source_files.note_imports()
        probe.write("end", {"sources": process_state.source_files.hashes})
        return probe.is_stopped


def _run_recipe(recipe: Recipe, trial: Trial) -> None:
    """Run the first steps, the last batch of the epoch and one evaluation."""
    from samestep.recipes.builder import build  # needs packages that scripts do not need

    assert trial.steps is not None
    config = recipe.step
    # A reference on one process has nothing to divide; other runs on one process may use several devices.
    uses_devices = recipe.strategy.name in ("dp", "device_map") and trial.reference is not None
    strategy = recipe.strategy if trial.processes > 1 or uses_devices else None
    with start(device=trial.device, reduction=config.reduction, threads=config.threads, strategy=strategy) as world:
        built = build(recipe, RunOptions(device=trial.device, workers=0), world)
        if trial.checkpoint is not None:
            built.train.cursor = load(trial.checkpoint, built.engine.training).cursor
            built.engine.steps = int(trial.checkpoint.resolve().name.removeprefix("step-"))
        if built.engine.steps < trial.steps:
            for batch in built.train:
                result = built.engine.step(batch)
                if trial.kill_at is not None:
                    _save(built, trial, result.step, batch.end)
                if result.step >= trial.steps or batch.end.epoch > batch.begin.epoch:
                    break
        train = built.train
        if train.cursor.samples:  # the last batch of the epoch, unless the earlier steps included it
            train.cursor = Cursor(train.cursor.epoch, (len(train) - 1) * train.batch_size)
            for batch in train:
                built.engine.step(batch)
        built.engine.evaluate(built.evaluation, list(built.metrics))


def _save(built: Built, trial: Trial, step: int, cursor: Cursor) -> None:
    world = built.engine.world
    files = pack(built.engine.training, Progress(step=step, cursor=cursor), keep=world.is_main)
    if world.is_main:
        CheckpointFolder(trial.folder / "checkpoints").write(step, files, is_best=False)
    world.barrier()  # the kill of the last rank must not interrupt the write


def _run_script(subject: Subject, trial: Trial, log: Path) -> None:
    """Run the script as `samestep run` does, with standard output in a file."""
    assert subject.script is not None
    process_state.checkpoint_root = scratch = trial.own_folder.resolve()
    arguments = tuple(argument.replace("{folder}", str(scratch)) for argument in subject.arguments)
    with log.open("a") as output, contextlib.redirect_stdout(output):
        run_script(subject.script, arguments)


def _watch_progress(probe: Probe, patience: float) -> None:
    """End this process after `patience` seconds without an event; ranks that wait for each other do not end."""

    def watch() -> None:
        while (idle := time.monotonic() - probe.last_event) < patience:
            time.sleep(patience - idle + 0.01)
        probe.write("stuck", {"seconds": patience})
        print(f"no progress for {patience:g} s", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="samestep-verify-watch", daemon=True).start()
