"""Accelerate: `prepare`, `backward` and `save_state` with the same results on any number of processes.

    from samestep.integrations.accelerate import Accelerator

The body of a training loop runs once per microbatch of this process. Optimizers and schedulers act at the last one of a
global batch, where `accelerator.sync_gradients` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import DataLoader

from samestep.config import DeviceKind
from samestep.distributed.devices import accelerator_module
from samestep.distributed.world import World, gather_numbers
from samestep.engine.buffer_rules import Rule
from samestep.engine.step_stats import StepResult
from samestep.integrations.accelerate_gather import GatheringAccelerator, Iteration
from samestep.integrations.accelerate_loader import Position, PreparedLoader
from samestep.integrations.accelerate_options import (
    ScheduleCheck,
    learning_rates,
    require_no_accumulation,
    require_placement,
    require_replication,
    require_supported_options,
    require_supported_state,
)
from samestep.integrations.microbatch_loop import MicrobatchLoop, counted_loss
from samestep.integrations.torch_loader import integration_error
from samestep.launcher.job import process_state
from samestep.microbatches import Cursor, Microbatches
from samestep.session import enter


class Accelerator(GatheringAccelerator):
    """`accelerate.Accelerator` whose results do not depend on the number of processes.

    The batch size of a training `DataLoader` counts the samples of a global batch, over all processes; an iteration
    yields the microbatches of this process. With the model in evaluation mode, or within `torch.no_grad()`, each batch
    of a `DataLoader` is computed by one process, and each sample is counted once.

    Args:
        global_batch_size: samples of an optimizer step; None for the batch size of the training `DataLoader`.
        microbatches: fixed slices of a global batch, at least as many as processes; see
            `docs/concepts/microbatches.md`.
        seed: seed of order, augmentation, dropout and other random states.
        buffers: rules for buffers that a training forward changes, as in `samestep.Engine`.
        world: the world of `samestep.start()`; None to adopt the process group that Accelerate creates.
        **options: of `accelerate.Accelerator`.

    Attributes:
        world: the ranks.
        step_result: result of the last optimizer step, such as the mean `loss` of the global batch; the same on every
            process. None before the first step.
        iterations: those over prepared loaders that run at present, the innermost one last.

    Raises:
        InputError: an option or the launch configuration does not fit the steps of a global batch.
    """

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        microbatches: Microbatches = "auto",
        seed: int = 0,
        buffers: Mapping[str, Rule] | None = None,
        world: World | None = None,
        **options: Any,
    ) -> None:
        require_supported_options(options)
        # Otherwise, on a machine without GPUs, each process of a launcher would train alone.
        options.setdefault("cpu", accelerator_module().device_count() == 0)
        threads = torch.get_num_threads()
        super().__init__(**options)  # sets another number
        torch.set_num_threads(threads)
        require_replication(self.state)
        self._owns_world = world is None
        self.world = self._adopted_world() if world is None else world
        require_supported_state(self, self.world)
        self.global_batch_size, self.microbatches, self.seed = global_batch_size, microbatches, seed
        self.step_result: StepResult | None = None
        self._buffers = buffers
        self._loop: MicrobatchLoop | None = None
        self._trained: torch.nn.Module | None = None
        self._loaders: list[PreparedLoader] = []
        self._updating: list[torch.optim.Optimizer] = []
        self._needs_update = False  # no optimizer has used the last gradient
        self._position = Position(self)
        self.register_for_checkpointing(self._position)

    @property
    def is_training(self) -> bool:
        """Whether an iteration that begins now computes steps: in training mode, and with gradients."""
        return self._trained is not None and self._trained.training and torch.is_grad_enabled()

    @property
    def gradient_accumulation_steps(self) -> int:
        """1: microbatches replace accumulation. Another number is refused."""
        return int(super().gradient_accumulation_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        require_no_accumulation(steps)

    @property
    def cursor(self) -> Cursor:
        """Position in the training data: number of complete epochs, and samples of the current one."""
        cursors = [loader.loader.cursor for loader in self._loaders if loader.is_stepped]
        return cursors[0] if cursors else Cursor()

    @property
    def loop(self) -> MicrobatchLoop:
        """The steps; created at the first use, a collective."""
        if self._loop is None:
            if self._trained is None:
                fix = "accelerator.prepare(model, optimizer, loader)"
                raise integration_error("a training iteration without a prepared model with trained parameters", fix)
            steps = self._position.steps
            self._loop = MicrobatchLoop(self._trained, world=self.world, seed=self.seed, buffers=self._buffers)
            self._loop.engine.steps = steps
        return self._loop

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        if isinstance(obj, PreparedLoader):  # no DataLoader of torch
            return self.prepare_data_loader(obj, device_placement)
        return super()._prepare_one(obj, first_pass, device_placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Move a model to the device and prepare it for mixed precision; there is no wrapper."""
        if any(parameter.requires_grad for parameter in model.parameters()) and not evaluation_mode:
            if self._trained not in (None, model):
                raise integration_error(
                    "two prepared models with trained parameters",
                    "make both parts of one torch.nn.Module; freeze a model that is not trained",
                )
            require_placement(device_placement)
            self._trained = model
        # In evaluation mode, Accelerate does not wrap the model in DDP.
        return cast("torch.nn.Module", super().prepare_model(model, device_placement, evaluation_mode=True))

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any] | PreparedLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Return a loader of microbatches in training, and of whole batches in evaluation."""
        require_placement(device_placement)
        prepared = data_loader if isinstance(data_loader, PreparedLoader) else PreparedLoader(self, data_loader)
        if prepared not in self._loaders:  # as after free_memory
            self._loaders.append(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return an optimizer that acts at the end of a global batch."""
        updating = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if updating not in self._updating:
            updating.register_step_post_hook(self._count_update)
            self._updating.append(updating)
        return super().prepare_optimizer(optimizer, device_placement)

    def _count_update(self, *arguments: Any) -> None:
        if self.sync_gradients:
            self._needs_update = False

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> AcceleratedScheduler:
        """Return a scheduler with one step per global batch."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # otherwise one step per process
        return prepared

    def _do_sync(self) -> None:
        """Leave `sync_gradients`, which the prepared loader sets, unchanged."""

    def train_on(self, iteration: Iteration) -> Iterator[Any]:
        """Yield the data of the microbatches of a training iteration."""
        loop, begun, schedule = self.loop, -1, ScheduleCheck(self._updating)
        try:
            for data in loop.microbatches(iteration.loader.loader):
                if loop.is_first:
                    self._require_update()
                    self._needs_update, begun = True, loop.engine.steps
                    schedule.begin()
                else:
                    schedule.require_unchanged()
                self.gradient_state.sync_gradients = loop.is_last
                iteration.is_filler = loop.microbatch is not None and loop.microbatch.is_filler
                yield data
        finally:
            # A loop that ends within a global batch undoes the batch, which then needs no update.
            if loop is self._loop and loop.engine.steps == begun:
                self._restore_update()

    def _restore_update(self) -> None:
        """Allow another step, or a save, as after an update."""
        self._needs_update, self.gradient_state.sync_gradients = False, True

    def _require_update(self) -> None:
        if self._needs_update:
            raise integration_error(
                f"no prepared optimizer used the gradient of step {self.loop.engine.steps}",
                "prepare the optimizer; global_batch_size= in place of accumulation by hand",
            )

    def backward(self, loss: torch.Tensor, *, count: float | torch.Tensor | None = None) -> None:
        """Compute the gradient of a microbatch, and after the last one the gradient of the global batch.

        Args:
            loss: the mean over the samples of the microbatch, or with `count` over as many items.
            count: number of items, such as tokens without padding; the global batch is divided by the sum of counts.

        Raises:
            InputError: as `MicrobatchLoop.backward`.
            NonFiniteError: loss or gradient of the global batch is not finite.
        """
        self.loop.backward(loss if count is None else counted_loss(loss, count))
        if self.loop.is_last and self.loop.result is not None:
            rate = next(iter(learning_rates(self._updating)), None)
            self.step_result = replace(self.loop.result, lr=0.0 if rate is None else float(rate))

    def check_trigger(self) -> bool:
        """Return whether a process has called `set_trigger` since the last true result; a collective."""
        is_set = any(flag for (flag,) in gather_numbers(self.world, [bool(self.flag_tensor)]))  # type: ignore[has-type]
        if is_set:
            self.flag_tensor = None
        return is_set

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save the state with the position in the data, after a complete optimizer step."""
        if self._loop is not None and (self._loop.is_open or self._needs_update):
            fix = "save `if accelerator.sync_gradients:`, after optimizer.step()"
            raise integration_error("accelerator.save_state within a global batch", fix)
        return super().save_state(output_dir, safe_serialization, **options)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> Any:
        """Load the state with the position in the data, outside of loops over prepared loaders."""
        if self.iterations:
            fix = "call accelerator.load_state before the loop, or after its end"
            raise integration_error("accelerator.load_state in a loop over a prepared loader", fix)
        super().load_state(input_dir, load_kwargs, **options)
        self._restore_update()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Refuse, as an `InputError`: `load_state` restores the position."""
        fix = "iterate the prepared loader itself after load_state, from epoch accelerator.cursor.epoch"
        raise integration_error("accelerator.skip_first_batches", fix)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refuse, as an `InputError`: every process runs the body of a loop equally often."""
        raise integration_error("accelerator.join_uneven_inputs", "remove the block")

    def free_memory(self, *objects: Any) -> Any:
        """Release the prepared objects; another model can be prepared then."""
        self._trained, self._loop, self._has_evaluated = None, None, False
        self._restore_update()
        self._position.reset()
        self._loaders.clear()
        self._updating.clear()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Finish trackers, and leave the world if Accelerate's process group was adopted."""
        if self._owns_world:
            process_state.session.close()
            super().end_training()
            return
        for tracker in self.trackers:
            tracker.finish()

    def _adopted_world(self) -> World:
        timeout = None if self.init_handler is None else self.init_handler.timeout
        return enter(device=cast("DeviceKind", self.device.type), timeout=timeout, adopt=True)
