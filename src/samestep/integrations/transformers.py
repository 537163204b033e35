"""Trainers of Hugging Face with the same results on any number of processes.

    trainer = samestep.integrations.transformers.Trainer(model, arguments, train_dataset=data, global_batch_size=64)

One batch of the trainer is one global batch: each rank computes its microbatches, and the gradient of the global batch
is in `.grad` when the trainer clips it and steps the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from samestep.config import DeviceKind, StepConfig
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.distributed.devices import set_tf32
from samestep.distributed.rng import microbatch_seed, preserved_generators, seed_generators
from samestep.distributed.world import World, all_gather
from samestep.engine.buffer_rules import Rule
from samestep.engine.consistency import ConsistencyCheck
from samestep.engine.engine import Engine
from samestep.engine.gather import LocalOutputs
from samestep.engine.sync_batch_norm import norm_layers
from samestep.integrations.accelerate_options import require_replication
from samestep.integrations.microbatch_loop import GradientsOnly, counted_loss, with_numbers
from samestep.integrations.torch_loader import global_loader, integration_error
from samestep.integrations.transformers_gather import MicrobatchMetrics, join_predictions, own_values
from samestep.integrations.transformers_loader import EvaluationDataLoader, SamestepCallback, StepDataLoader
from samestep.integrations.transformers_options import require_supported_arguments, require_supported_class
from samestep.microbatches import Microbatches, auto_microbatches
from samestep.session import enter

if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object

_IGNORED = -100  # label that no loss of Transformers counts


class SamestepTrainerMixin(_Trainer):
    """Steps and evaluations of a trainer of Transformers with the same result on any number of processes.

    `per_device_train_batch_size` is not used. `per_device_eval_batch_size` is the size of a microbatch of evaluations.

    Args:
        arguments: positional arguments of the trainer.
        global_batch_size: samples of an optimizer step over all processes.
        microbatches: fixed slices of a global batch, at least as many as processes; see
            `docs/concepts/microbatches.md`.
        buffers: rules for buffers that a training forward changes, as in `samestep.Engine`.
        threads: intra-op threads of a rank; another number changes bits.
        run: name or path of a run directory, as in `samestep.start`; None for none.
        options: further arguments of the trainer.

    Raises:
        InputError: an argument does not fit the steps of a global batch.
    """

    def __init__(
        self,
        *arguments: Any,
        global_batch_size: int,
        microbatches: Microbatches = "auto",
        buffers: Mapping[str, Rule] | None = None,
        threads: int = 1,
        run: str | Path | None = None,
        **options: Any,
    ) -> None:
        require_supported_class(type(self), SamestepTrainerMixin)
        self._global_batch_size, self._microbatches = global_batch_size, microbatches
        self._buffers, self._threads, self._run = buffers, threads, run
        self._engine: Engine | None = None
        self._losses: list[tuple[float, float]] = []
        self._preprocess: Any = None  # `preprocess_logits_for_metrics` of the present evaluation
        super().__init__(*arguments, **options)
        self._position = SamestepCallback()
        self.add_callback(self._position)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which leaves data and model as they are, and the world of its ranks."""
        require_supported_arguments(self.args)
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        require_replication(accelerator.state)
        accelerator.prepare_data_loader = lambda loader, *_, **__: loader
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)  # without DDP
        # Each microbatch counts its own tokens, and the engine divides by the number of all.
        self.args.average_tokens_across_devices = False
        device = cast("DeviceKind", self.args.device.type)
        self._world: World = enter(adopt=True, device=device, threads=self._threads, run=self._run)
        set_tf32(self._world.device, allowed=bool(self.args.tf32))  # as in steps, for an evaluation before the first
        self._values = MicrobatchMetrics(self, self._world)

    def get_train_dataloader(self) -> Any:
        """Return a loader with one global batch per step."""
        number = self._microbatches
        assert self.model is not None
        # In any mode: models of `from_pretrained` are in evaluation mode until the first step.
        if number == "auto" and not norm_layers(self.model):
            number = auto_microbatches(self._global_batch_size, batch_norm=False)
        loader = self._global_loader(super().get_train_dataloader(), self._global_batch_size, number)
        self._position.loader = loader
        return StepDataLoader(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of global batches."""
        return self._evaluation_loader(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of global batches."""
        return self._evaluation_loader(super().get_test_dataloader(test_dataset))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of the trainer, with the length groups of global batches."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size = self._global_batch_size  # not that of one device, which is not used
        return sampler

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples."""
        if isinstance(dataloader, StepDataLoader):
            return dataloader.steps.loader.samples
        return super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the global batch size."""
        return self._global_batch_size

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the next global batch; its microbatches count their own items."""
        return [batch for batch in [next(epoch_iterator, None)] if batch is not None], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute loss and gradients of a global batch; a collective.

        Returns:
            The mean loss of the global batch.
        """
        _require_global_batch(inputs, "get_train_dataloader")
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        engine = self._engine_of(model)
        engine.steps = self.state.global_step
        with getattr(self, "maybe_activation_offload_context", nullcontext()):  # of trainers of TRL
            result = engine.step(with_numbers(inputs), forward=self._forward)
        self._values.share()
        if result.stop:  # after the update, the trainer saves a checkpoint and ends
            self.control.should_save = self.control.should_training_stop = True
        # The trainer logs the mean over ranks, whose sum in float32 would be rounded.
        self._tr_loss = self._tr_loss.double()
        return torch.tensor(result.loss, device=self.args.device).double()

    def count_items(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the number of labels that the mean loss of a microbatch counts; None to count samples.

        Override this method for a loss that is a mean over something else.
        """
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, torch.Tensor):
            return None
        # Causal models predict the next token, and shift the labels themselves.
        is_shifted = self._loss_shifts_labels and "shift_labels" not in inputs
        return (labels[..., 1:] if is_shifted else labels).ne(_IGNORED).sum()

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Return loss, predictions and labels of a global batch, in the order of the samples; a collective."""
        _require_global_batch(inputs, "get_eval_dataloader or get_test_dataloader")
        self.gather_function = own_values  # every rank has all rows
        device, losses, computed = self._world.device, list[torch.Tensor](), list[LocalOutputs]()
        with preserved_generators(device):
            for microbatch in inputs.local_microbatches:
                facts = inputs.begin.samples, microbatch.number
                seed_generators(microbatch_seed("evaluation", self.args.seed, *facts), device)
                items = self.count_items(microbatch.data)
                step = super().prediction_step
                with self._values.microbatch(microbatch.number):
                    loss, logits, labels = step(model, microbatch.data, prediction_loss_only, ignore_keys, **options)
                if loss is not None:
                    count = torch.full((), microbatch.size, device=device) if items is None else items.to(device)
                    losses.append(torch.stack([loss.double(), count.double()]))
                if logits is not None and self._preprocess is not None:
                    logits = self._preprocess(logits, labels)
                computed.append(LocalOutputs(microbatch, logits, labels))
        self._values.share()
        own = torch.stack(losses).tolist() if losses else []  # waits for the device once
        rows = [row for rank in all_gather(own, self._world) for row in rank]
        total, number = math.fsum(mean * count for mean, count in rows if count), sum(count for _, count in rows)
        self._losses.append((total, number))
        loss = torch.tensor(total / number if number else math.nan, device=device) if rows else None
        if prediction_loss_only:
            return loss, None, None
        return loss, *join_predictions(computed, self._world)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run an evaluation that counts each sample once; the loss is the mean over all labels that count."""
        torch.set_num_threads(self._threads)
        self._losses = []
        if self._engine is None or not self.is_in_train:  # steps have compared the ranks
            self._compare_ranks()
        # For each microbatch, before predictions are sent, in place of once for the global batch.
        before = self.preprocess_logits_for_metrics, self._preprocess
        self.preprocess_logits_for_metrics, self._preprocess = None, before[0] or before[1]
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self.preprocess_logits_for_metrics, self._preprocess = before
        number = sum(count for _, count in self._losses)
        if output.metrics is not None and number:
            output.metrics[f"{metric_key_prefix}_loss"] = math.fsum(total for total, _ in self._losses) / number
        return output

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the number of operations of this rank's microbatches."""
        if not isinstance(inputs, GlobalBatch):
            return super().floating_point_ops(inputs)
        # Proportional to the tokens; each call counts the parameters of the model.
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = [microbatch.data[name].numel() for microbatch in inputs.local_microbatches if name in microbatch.data]
        return super().floating_point_ops({name: torch.empty(sum(tokens), device="meta")} if tokens else {})

    def _load_callback_state(self) -> None:
        """Restore the callbacks of a checkpoint, except for the one of this trainer, which has the loader."""
        super()._load_callback_state()
        self.remove_callback(SamestepCallback)
        self.add_callback(self._position)

    def _compare_ranks(self) -> None:
        """Compare parameters and buffers of the model between ranks; a collective."""
        assert self.model is not None
        ConsistencyCheck(self.model, None, self._world, None).compare(self.state.global_step)

    def _evaluation_loader(self, loader: DataLoader[Any]) -> EvaluationDataLoader:
        size = self._global_batch_size
        number = auto_microbatches(size, batch_norm=False) if self._microbatches == "auto" else self._microbatches
        # Complete, also with dataloader_drop_last, whose batches of one process are smaller.
        batches = BatchSampler(loader.sampler, 1, drop_last=False) if loader.sampler is not None else None
        samples = self.args.eval_batch_size * number
        return EvaluationDataLoader(self._global_loader(loader, samples, number, batches), loader.dataset)

    def _global_loader(
        self, loader: DataLoader[Any], size: int, number: Microbatches, batches: BatchSampler | None = None
    ) -> Loader:
        """Return a loader of global batches, in the order of `data_seed`, or of `seed` without one."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return global_loader(
            loader, world=self._world, seed=seed, batch_size=size, microbatches=number, batch_sampler=batches
        )

    def _engine_of(self, model: torch.nn.Module) -> Engine:
        if self._engine is None or self._engine.model is not model:
            torch.set_num_threads(self._threads)  # the set-up of the trainer can change it
            config = StepConfig(seed=self.args.seed, threads=self._threads, tf32=bool(self.args.tf32))
            optimizer = GradientsOnly(model)
            self._engine = Engine(model, optimizer, world=self._world, config=config, buffers=self._buffers)
        assert isinstance(self._engine.optimizer, GradientsOnly)
        self._engine.optimizer.follow()
        return self._engine

    def _forward(self, model: Any, microbatch: Any) -> Any:
        """Return the loss of a microbatch, as the forward function of the engine."""
        inputs = self._prepare_inputs(microbatch.data)
        count = self.count_items(inputs)
        items = None if count is None else count.clamp(min=1)
        takes_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        with self._values.microbatch(microbatch.number), self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=items if takes_items else None)
        return loss if count is None else counted_loss(loss, count)


class Trainer(SamestepTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with the same results on any number of processes; see `SamestepTrainerMixin`."""


class Seq2SeqTrainer(SamestepTrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with the same results on any number of processes; see `SamestepTrainerMixin`."""


def _require_global_batch(batch: object, method: str) -> None:
    if not isinstance(batch, GlobalBatch):
        raise integration_error(
            f"a batch of the type {type(batch).__name__}, of an overridden {method}",
            "pass another dataset or data_collator, or override _get_train_sampler",
        )
