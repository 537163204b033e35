"""Non-finite losses and gradients: the decision to stop or skip, and the errors that name their source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.world import World, all_gather
from samestep.engine.step_stats import StepStats
from samestep.errors import NonFiniteError
from samestep.strategies.local_parameters import LocalParameters

if TYPE_CHECKING:
    from samestep.engine.step_runner import StepRunner

_MAX_LISTED = 8


def ends_run(config: StepConfig, stats: StepStats, scaler: torch.amp.GradScaler) -> bool:
    """Return whether a step that is not finite raises an error; otherwise its update is skipped."""
    # Under fp16, overflows of gradients are expected: the scaler reduces its scale.
    is_scaling = scaler.is_enabled() and not stats.bad_microbatches
    return config.non_finite == "stop" and not is_scaling


def skipped_most(skipped: int, steps: int) -> bool:
    """Return whether a run of `steps` steps, of which `skipped` were skipped, has failed."""
    return 2 * skipped > steps


def has_finite_gradient(
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    parameters: Iterable[torch.nn.Parameter],
) -> bool:
    """Compute the backward of a microbatch, and return whether every element of its gradients is finite.

    The backward begins at `tensors` with `gradients`: at a scalar loss with None, or at outputs.
    """
    computed = torch.autograd.grad(tensors, list(parameters), gradients, allow_unused=True)
    return all(_all_finite(gradient) for gradient in computed if gradient is not None)


def flagged_by_any(microbatches: Sequence[int], batch: GlobalBatch, world: World) -> list[int]:
    """Return the union of `microbatches` over all ranks; a collective."""
    flags = torch.zeros(batch.microbatches, dtype=torch.float64, device=world.device)
    flags[list(microbatches)] = 1
    world.all_reduce(flags)
    return flags.nonzero().flatten().tolist()


def non_finite_error(
    batch: GlobalBatch, stats: StepStats, steps: int, runner: StepRunner, parameters: LocalParameters
) -> NonFiniteError:
    """Return the error for the step after `steps` steps, with a non-finite loss or gradient; a collective."""
    if stats.bad_microbatches:
        microbatches = runner.bad_losses(batch, stats)
        loss, samples = stats.losses[stats.bad_microbatches[0]], _samples(batch, microbatches)
        problem = f"the loss of {_listed('microbatch', microbatches)} is not finite (loss {loss}; {samples})"
        fix = "check these samples and the learning rate"
    else:
        bad = [name for p, name in parameters.names.items() if p.grad is not None and not _all_finite(p.grad)]
        if parameters.is_divided:
            bad = list(dict.fromkeys(chain(*all_gather(bad, runner.world))))
        subject = _listed("parameter", bad) if bad else "the whole model"
        problem = f"the gradient of {subject} is not finite, {_source(batch, runner.bad_gradients(batch, steps))}"
        fix = "check these samples, lower the learning rate or set clip_norm"
    return NonFiniteError(
        f"step {steps + 1}: {problem}",
        expected="non_finite: stop ends the run before the weights change",
        fix=f"{fix}; non_finite: skip skips such steps",
    )


def _source(batch: GlobalBatch, microbatches: Sequence[int] | None) -> str:
    if microbatches is None:
        return "from unknown microbatches, because ranks divide the parameters (ddp can name them)"
    if not microbatches:
        return "although each microbatch's gradient is finite: the sum or the norm overflows"
    return f"from {_listed('microbatch', microbatches)} ({_samples(batch, microbatches)})"


def _all_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _samples(batch: GlobalBatch, microbatches: Sequence[int]) -> str:
    return _listed("sample", [sample for microbatch in microbatches for sample in batch.samples_of(microbatch)])


def _listed(noun: str, items: Sequence[object]) -> str:
    listed = ", ".join(str(item) for item in items[:_MAX_LISTED])
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    plural = "microbatches" if noun == "microbatch" else f"{noun}s"
    return f"{plural if len(items) > 1 else noun} {listed}{more}"
