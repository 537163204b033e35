"""Lightning strategy: training, validation, tests and predictions with the same results on any number of processes.

    trainer = lightning.Trainer(strategy=SamestepStrategy(global_batch_size=256))

One batch of Lightning is one global batch: each rank computes its microbatches, and the gradient of the global batch is
in `.grad` when Lightning clips it and steps the optimizer.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper, _sync_module_states
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from samestep.config import DeviceKind, StepConfig
from samestep.distributed.devices import allows_tf32
from samestep.distributed.rng import microbatch_seed, preserved_generators, seed_generators
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.buffer_rules import Rule
from samestep.engine.engine import Engine
from samestep.engine.gather import LocalOutputs, gather_outputs
from samestep.engine.step_stats import StepResult
from samestep.integrations.lightning_loader import PredictionDataLoader, SamestepBatch, SamestepDataLoader
from samestep.integrations.lightning_log import BatchLog, WithoutMetrics, refused_sync, warn_of_inexact_metrics
from samestep.integrations.lightning_options import (
    require_one_batch_per_step,
    require_supported,
    require_supported_training,
)
from samestep.integrations.microbatch_loop import GradientsOnly
from samestep.integrations.torch_loader import global_loader, integration_error
from samestep.microbatches import Microbatches, auto_microbatches
from samestep.session import start


class SamestepStrategy(DDPStrategy):
    """Strategy of Lightning that computes each batch with the same result on any number of processes.

    The batch size of every `DataLoader` counts the samples of a global batch, over all processes.

    Args:
        global_batch_size: samples of an optimizer step; None for the batch size of the training `DataLoader`.
        microbatches: fixed slices of a batch, at least as many as processes; see `docs/concepts/microbatches.md`.
        seed: seed of order, augmentation, dropout and other random states.
        buffers: rules for buffers that a training forward changes, as in `samestep.Engine`.
        threads: intra-op threads of a rank; another number changes bits.
        run: name or path of a run directory, as in `samestep.start`; None for none.
        timeout: as in `DDPStrategy`, as the following ones; None for 10 minutes.

    Raises:
        InputError: the module or the trainer uses a feature that does not fit the steps of a global batch.
    """

    strategy_name = "samestep"

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        microbatches: Microbatches = "auto",
        seed: int = 0,
        buffers: Mapping[str, Rule] | None = None,
        threads: int = 1,
        run: str | Path | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout or timedelta(minutes=10),
            start_method=start_method,
        )
        self._global_batch_size, self._microbatches, self._seed = global_batch_size, microbatches, seed
        self._buffers, self._threads, self._run = buffers, threads, run
        self._session = ExitStack()
        self._world: World | None = None
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        self._is_in_step = False  # of the module, for one microbatch

    def setup_environment(self) -> None:
        """Create the process group, and the world of its ranks."""
        super().setup_environment()
        self._error = None
        device = cast("DeviceKind", self.root_device.type)
        world = start(adopt=True, device=device, threads=self._threads, run=self._run)
        self._world = self._session.enter_context(world)
        # The loaders of Samestep divide the data; Lightning would replace the sampler. Hooks may create loaders.
        self._module.trainer._accelerator_connector.use_distributed_sampler = False

    def setup(self, trainer: Trainer) -> None:
        """Prepare module and optimizers, and the engine for training; a collective."""
        require_supported(self._module, trainer, self.precision_plugin)
        if trainer.state.fn == TrainerFn.FITTING:
            require_supported_training(self._module, trainer, has_layer_sync=self._layer_sync is not None)
        # All ranks log equal values: `require_equal_values`.
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
        super().setup(trainer)
        module, world = self._module, self._ranks
        torch.set_num_threads(self._threads)
        if world.is_main:
            warn_of_inexact_metrics(module)
        self._log, self._engine = BatchLog(module, world), None
        if trainer.state.fn == TrainerFn.FITTING:
            view = WithoutMetrics.of(module)
            self._gradients = GradientsOnly(view)
            config = StepConfig(seed=self._seed, threads=self._threads, tf32=allows_tf32())
            self._engine = Engine(
                view, self._gradients, world=world, config=config, buffers=self._buffers, callbacks=[self._log]
            )
            self._signals = _TrainingSignals(trainer, world)
            self._session.callback(self._signals.remove)

    def configure_ddp(self) -> None:
        """Send the state of rank 0 to all ranks; the module is not wrapped."""
        _sync_module_states(self._module)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader of global batches in place of a `DataLoader`."""
        if isinstance(dataloader, SamestepDataLoader):  # in a `CombinedLoader` that is used again
            dataloader = dataloader.original
        if not isinstance(dataloader, DataLoader):
            fix = "a torch DataLoader, whose dataset has a length and an index"
            raise integration_error(f"a {type(dataloader).__name__} as a data loader", fix)
        sampler: Any = dataloader.batch_sampler
        if isinstance(sampler, _IndexBatchSamplerWrapper):  # of Lightning, for predictions
            sampler = sampler._batch_sampler
        trainer = self._module.trainer
        is_training = bool(trainer.training)
        size, microbatches = self._sizes(getattr(sampler, "batch_size", None), is_training=is_training)
        loader = global_loader(
            dataloader,
            world=self._ranks,
            seed=self._seed,
            batch_size=size,
            microbatches=microbatches,
            batch_sampler=sampler,
        )
        if trainer.predicting:
            return PredictionDataLoader(loader, dataloader)
        return SamestepDataLoader(loader, dataloader, is_training=is_training)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return a batch of Samestep unchanged: microbatches are transferred when they are computed."""
        self._loader_index = dataloader_idx
        return batch if isinstance(batch, SamestepBatch) else super().batch_to_device(batch, device, dataloader_idx)

    def on_train_start(self) -> None:
        """Move to the position in the data of a checkpoint.

        Lightning does, unless a hook has created the loaders before it restores the state of the loops.
        """
        super().on_train_start()
        self._module.trainer.fit_loop._load_combined_loader_states()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare the values of hooks after each epoch and after the first batch, and requeue a job on request."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx <= 1:
            self._log.require_equal_values()
        self._signals.begin_batch()

    def on_train_end(self) -> None:
        """Compare the values of hooks."""
        super().on_train_end()
        self._log.require_equal_values()

    def on_validation_start(self) -> None:
        """Let the validation complete."""
        super().on_validation_start()
        if self._engine is not None:
            self._signals.begin_validation()

    def on_validation_end(self) -> None:
        """Compare the values of hooks."""
        super().on_validation_end()
        self._log.require_equal_values()
        if self._engine is not None:
            self._signals.end_validation()

    def on_test_end(self) -> None:
        """Compare the values of hooks."""
        super().on_test_end()
        self._log.require_equal_values()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the loss and the gradients of a global batch; a collective.

        Returns:
            The mean loss of the global batch, without a graph.
        """
        batch, engine, trainer = args[0], self._engine, self._module.trainer
        assert engine is not None
        if not isinstance(batch, SamestepBatch):
            raise integration_error(
                "a batch of several training DataLoaders",
                "one DataLoader of a dataset with the samples of both: torch.utils.data.StackDataset(first, second)",
            )
        require_one_batch_per_step(trainer)
        self._arguments = args[1:], kwargs
        self._gradients.follow()
        engine.steps = trainer.global_step
        with self._log.batch(is_training=True), self._step_of_module():
            result = engine.step(batch.global_batch, forward=self._forward, save=self._signals.requests_requeue)
        self._signals.end_step(result)
        # Lightning sets gradients to None, or to zero in place, before it calls `backward`.
        self._computed = [(parameter, parameter.grad) for parameter in self._gradients.param_groups[0]["params"]]
        for parameter, _ in self._computed:
            parameter.grad = None
        return torch.tensor(result.loss, device=self.root_device)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Set the gradients of the global batch, with the hooks of Lightning before and after."""
        self.precision_plugin.pre_backward(closure_loss, self._module)
        for parameter, gradient in self._computed:
            parameter.grad = gradient
        self._computed = []
        return self.precision_plugin.post_backward(closure_loss, self._module)

    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        """Compute the microbatches of this rank; a collective."""
        self._evaluate("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> None:
        """Compute the microbatches of this rank; a collective."""
        self._evaluate("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions of the whole batch on every rank, in the order of the samples; a collective."""
        computed = self._evaluate("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)
        return gather_outputs(computed, self._ranks).outputs

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor from all ranks, outside of steps."""
        self._require_no_step("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object to all ranks, outside of steps."""
        self._require_no_step("broadcast")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, outside of steps."""
        self._require_no_step("barrier")
        super().barrier(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, outside of steps; a mean of equal values is that value."""
        self._require_no_step("reduce")  # and reduce_boolean_decision, which calls this method
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        # In float64, because the sum of equal values is rounded: a third of 3 * x can differ from x.
        return super().reduce(tensor.double(), group, reduce_op).to(tensor.dtype)

    def on_exception(self, exception: BaseException) -> None:
        """Note that this rank fails: others may not reach the end of the world, unless all ranks stop."""
        is_agreed = self._engine is not None and isinstance(exception, SIGTERMException)
        self._error = None if is_agreed else exception
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the world; the process group stays."""
        error, self._error = self._error, None
        self._session.__exit__(type(error) if error is not None else None, error, None)
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _ranks(self) -> World:
        assert self._world is not None
        return self._world

    def _forward(self, _: torch.nn.Module, data: Any) -> Any:
        """Return the loss of the current microbatch, as the forward function of the engine."""
        positional, named = self._arguments
        with self.precision_plugin.train_step_context():
            output = self._module.training_step(self._transferred(data), *positional, **named)
        if output is None:
            raise integration_error(
                "training_step returned None, with which Lightning skips a batch",
                "leave the samples out of the dataset, or return samestep.Loss(0 * loss, 0): a sum and a count of zero",
            )
        return {"loss": output["loss"]} if isinstance(output, Mapping) else output

    @contextmanager
    def _step_of_module(self) -> Iterator[None]:
        """Refuse collectives of the libraries in the block: ranks have different numbers of microbatches."""
        self._is_in_step = True
        try:
            with refused_sync():
                yield
        finally:
            self._is_in_step = False

    def _require_no_step(self, name: str) -> None:
        if self._is_in_step:
            fix = "self.log for values; samestep.Engine with gather='global' for a loss that compares samples"
            raise integration_error(f"the collective {name} in a step of the module", fix)

    def _transferred(self, data: Any) -> Any:
        data = self.precision_plugin.convert_input(data)
        return super().batch_to_device(data, self.root_device, self._loader_index)

    def _evaluate(
        self, name: str, context: AbstractContextManager[None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[LocalOutputs]:
        """Return the outputs of the microbatches of this rank; a collective."""
        batch, *others = args
        if not isinstance(batch, SamestepBatch):
            raise integration_error(
                f"{name} with a batch of {len(batch)} DataLoaders at once",
                'a list of DataLoaders, or CombinedLoader(loaders, mode="sequential")',
            )
        computed, step = list[LocalOutputs](), getattr(self._module, name)
        log = self._log.batch(is_training=False)
        with log, preserved_generators(self._ranks.device), context, self._step_of_module():
            for microbatch in batch.global_batch.local_microbatches:
                begin = batch.global_batch.begin.samples
                seed_generators(microbatch_seed("evaluation", self._seed, begin, microbatch.number), self._ranks.device)
                self._log.begin_microbatch(microbatch)
                outputs = step(self._transferred(microbatch.data), *others, **kwargs)
                computed.append(LocalOutputs(microbatch, outputs, None))
        return computed

    def _sizes(self, size: int | None, *, is_training: bool) -> tuple[int | None, Microbatches]:
        """Return the batch size that replaces `size`, and microbatches; both do not depend on the number of ranks."""
        if is_training:
            size = self._global_batch_size or size
            if (
                self._microbatches == "auto"
                and size is not None
                and not uses_batch_statistics(WithoutMetrics.of(self._module))
            ):
                return self._global_batch_size, auto_microbatches(size, batch_norm=False)
            return self._global_batch_size, self._microbatches
        if size is None:
            return None, self._microbatches
        number = auto_microbatches(size, batch_norm=False) if self._microbatches == "auto" else self._microbatches
        if size < self._ranks.size:
            raise integration_error(
                f"a DataLoader for evaluation with batch_size={size}, which {self._ranks.size} ranks share",
                f"DataLoader(dataset, batch_size={8 * self._ranks.size})",
            )
        return None, min(number, size)


class _TrainingSignals:
    """Replaces two handlers of a trainer: those of SIGTERM, and of the signal before Slurm requeues the job.

    Ranks agree on the requests at the end of a step. Lightning's handlers communicate and save at once, within a step
    in which other ranks wait for other messages, or have not received the signal.
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._connector, self._stop = trainer._signal_connector, world.context.stop
        self._requeue = self._connector._slurm_sigusr_handler_fn  # save, and requeue the job
        self._stops = self._requeues = False  # on every rank
        self._handlers = {
            "_sigterm_notifier_fn": self._request_stop,
            "_slurm_sigusr_handler_fn": self._request_requeue,
        }
        self.requests_requeue = False  # on this rank, since the last step
        vars(self._connector).update(self._handlers)

    def end_step(self, result: StepResult) -> None:
        """Apply the requests of all ranks."""
        if result.stop:
            # Lightning raises `SIGTERMException` after the hooks and the validation that follow the batch.
            self._stops = self._connector.received_sigterm = True
        if result.save:
            self._requeues, self.requests_requeue = True, False

    def begin_batch(self) -> None:
        """Save a checkpoint and requeue the job, if a rank has requested it; a collective then."""
        if self._requeues:
            self._requeues = False
            self._requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]

    def begin_validation(self) -> None:
        """Let a validation complete, which Lightning would end after its first batch."""
        self._connector.received_sigterm = False

    def end_validation(self) -> None:
        """Continue with a stop."""
        self._connector.received_sigterm = self._stops

    def remove(self) -> None:
        """Restore the handlers."""
        for name in self._handlers:
            vars(self._connector).pop(name, None)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop.number = self._stop.number or number

    def _request_requeue(self, number: int, frame: FrameType | None) -> None:
        self.requests_requeue = True


StrategyRegistry.register(
    SamestepStrategy.strategy_name, SamestepStrategy, description="Steps with the same bits on any number of processes"
)
