"""Rank processes of `plain_loop.py`: a contender is built once, and waits for its turns without using a processor.

The processes are forks of a server that has imported torch. They have the environment variables of torchrun. Each one
answers the commands of the benchmark until its pipe is closed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_loop_cases import (
    ACCELERATE,
    BACKWARDS,
    BATCHES,
    CASES,
    DDP,
    DDP_SYNC,
    EXACT,
    FABRIC,
    PARALLEL,
    UNWATCHED,
    Batch,
    Case,
    loss_of,
    matches_of,
)
from plain_loop_data import (
    endless,
    hand_written_epochs,
    recipe_epochs,
    torch_loader,
    use_statistics_of_all_ranks,
)
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.torchvision_import import make_torchvision_importable

PROFILED_STEPS = 10
PRELOAD = ("samestep.session", "accelerate", "lightning.fabric")  # where installed


class Loop:
    """A plain loop over batches, with the lines that a contender adds.

    Attributes:
        module: the model, without a wrapper of the contender.
        start: weights before the first step.
    """

    def __init__(self, contender: str, case: Case, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self._case = case
        self.module = case.build()
        self._optimizer: Any = case.optimizer(self.module)
        self._model: Any = self.module
        self._backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
        self._no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._gathers = False
        self._setup_loader: Callable[[Any], Any] = lambda loader: loader
        batches = [case.data(case.batch_size) for _ in range(BATCHES)]
        if contender in (PARALLEL, UNWATCHED):
            self._be_parallel(samestep.parallel(self.module))
        elif contender == EXACT:
            self._be_parallel(samestep.parallel(self.module, reduction="exact", microbatches=size))
        else:
            batches = [_own_rows(batch, rank, size) for batch in batches]
            self._gathers = size > 1
            self._be_peer(contender, size)
        self.start = self.weights()
        self._batches: Iterator[Batch] = cycle(batches)
        if case.dataset is not None:
            self._batches = endless(self._loader(contender, case.dataset(), rank, size))

    def _loader(self, contender: str, dataset: Any, rank: int, size: int) -> Any:
        case = self._case
        if contender in (PARALLEL, UNWATCHED):
            options = {"num_workers": case.workers, "persistent_workers": case.workers > 0}
            return samestep.loader(dataset, case.batch_size, shuffle=True, **options)
        if contender in (ACCELERATE, FABRIC):  # divide the batches themselves
            return self._setup_loader(torch_loader(dataset, case.batch_size // size, case.workers, 0, 1))
        return torch_loader(dataset, case.batch_size, case.workers, rank, size)

    def _be_parallel(self, model: torch.nn.Module) -> None:
        torch.set_num_threads(1)  # ranks share the cores, one has all
        self._model = model
        self._no_sync = lambda: samestep.no_sync(model)

    def _be_peer(self, contender: str, size: int) -> None:
        if contender in (DDP, DDP_SYNC):
            if contender == DDP_SYNC:
                use_statistics_of_all_ranks(self.module)
            self._model = DistributedDataParallel(self.module)
            self._no_sync = self._model.no_sync
        elif contender == ACCELERATE:
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            self._model, self._optimizer = accelerator.prepare(self.module, self._optimizer)
            self._backward = accelerator.backward
            self._no_sync = lambda: accelerator.no_sync(self._model)
            self._setup_loader = accelerator.prepare
        elif contender == FABRIC:
            fabric = _fabric(size)
            self._model, self._optimizer = fabric.setup(self.module, self._optimizer)
            self._backward = fabric.backward
            self._no_sync = lambda: fabric.no_backward_sync(self._model, enabled=size > 1)
            self._setup_loader = fabric.setup_dataloaders

    def take_steps(self, count: int) -> None:
        """Train or evaluate for some steps."""
        if self._case.kind == "evaluate":
            self._evaluate(count)
            return
        for _ in range(count):
            self._optimizer.zero_grad()
            if self._case.kind == "accumulate":
                with self._no_sync():
                    for _ in range(BACKWARDS - 1):
                        self._compute_gradients(1 / BACKWARDS)
                self._compute_gradients(1 / BACKWARDS)
            else:
                self._compute_gradients(1.0)
            self._optimizer.step()

    def _compute_gradients(self, scale: float) -> None:
        inputs, targets = next(self._batches)
        loss = loss_of(self._model(inputs), targets)
        self._backward(loss if scale == 1.0 else loss * scale)

    def _evaluate(self, count: int) -> None:
        self._model.eval()
        correct = torch.zeros(2)
        with torch.no_grad():
            for _ in range(count):
                inputs, targets = next(self._batches)
                matches = matches_of(self._model(inputs), targets)
                correct += torch.tensor([matches.sum(), matches.numel()])
        if self._gathers:
            dist.all_reduce(correct)

    def weights(self) -> torch.Tensor:
        """Return the trained parameters as one vector."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.module.parameters()])


class EpochLoop(Loop):
    """Epochs of the recipe `digits`, or of the same training by hand; a step is an epoch with its evaluation."""

    def __init__(self, contender: str, rank: int, size: int) -> None:
        if contender == PARALLEL:
            self.module, self._epoch = recipe_epochs()
        else:
            self.module, self._epoch = hand_written_epochs(rank, size)
        self.start = self.weights()

    def take_steps(self, count: int) -> None:
        """Train and evaluate for some epochs."""
        for _ in range(count):
            self._epoch()


def switch_off_checks() -> None:
    """Divide calls in this process without their list of operations, and compare no facts of the ranks.

    Calls follow that are all of one kind, which is divided by now.
    """
    from samestep.view.divided import DividedCall
    from samestep.view.rank_comparison import InStep

    compute_own: Any = DividedCall._run
    last: list[Any] = []

    def compute_unobserved(self: Any, *arguments: Any) -> Any:
        if last:
            self._known = last
        result = compute_own(self, *arguments)
        last[:] = result.operations.functions
        return result

    DividedCall._run = compute_unobserved  # type: ignore[method-assign]
    for name in ("facts_of_call", "facts_of_backward", "facts_of_step"):
        setattr(InStep, name, lambda *_, **__: None)


def _own_rows(batch: Batch, rank: int, size: int) -> Batch:
    rows = len(batch[0])
    own = slice(rows * rank // size, rows * (rank + 1) // size)
    return batch[0][own], batch[1][own]


def _fabric(size: int) -> Any:
    make_torchvision_importable()  # Lightning imports torchvision where it is installed
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    strategy: Any = "auto"
    if size > 1:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    return fabric


class Ranks:
    """Processes of one contender in one case.

    Args:
        case: name of the case.
        contender: name of the contender.
        processes: number of ranks.

    Attributes:
        first_steps: seconds of the first steps.

    Raises:
        RuntimeError: in any method, if a rank fails; with its stack.
    """

    def __init__(self, case: str, contender: str, processes: int) -> None:
        self.contender = contender
        self.processes = processes
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, *PRELOAD])
        port = _free_port()
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, case, contender, rank, processes, port)
            # Daemons cannot start workers of a loader.
            child = context.Process(target=_run_rank, args=arguments, daemon=CASES[case].workers == 0)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        self._answers()  # the model is built
        self.first_steps = 0.0

    def take_first_steps(self, steps: int) -> None:
        """Take steps in which ranks connect, data are tried and the division of calls is decided."""
        self.first_steps = steps * self.take_turn(steps)["wall"]

    def take_turn(self, steps: int) -> dict[str, float]:
        """Return seconds per step: of the clock, and of processors, summed over the ranks."""
        turns = self.ask("turn", steps)
        # The clock of all processes of a machine is one.
        wall = max(end for _, end, _ in turns) - min(begin for begin, _, _ in turns)
        return {"wall": wall / steps, "cpu": sum(used for *_, used in turns) / steps}

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Send a command to all ranks and return their answers."""
        for pipe in self._pipes:
            pipe.send((command, *arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            try:
                is_right, answer = pipe.recv()
            except EOFError:
                is_right, answer = False, "a rank ended"
            if not is_right:
                self.close()
                raise RuntimeError(f"{self.contender} on {self.processes}: {answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(10)
            if child.is_alive():
                child.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(pipe: Connection, case: str, contender: str, rank: int, size: int, port: int) -> None:
    """Answer commands as one rank."""
    try:
        _prepare_process(rank, size, port)
        if contender in (DDP, DDP_SYNC):
            dist.init_process_group("gloo")
        is_epoch = CASES[case].kind == "epoch"
        loop = EpochLoop(contender, rank, size) if is_epoch else Loop(contender, CASES[case], rank, size)
        commands: dict[str, Callable[..., Any]] = {
            "turn": lambda steps: _turn(loop, steps),
            "start": lambda: loop.start,
            "weights": loop.weights,
            "memory": lambda: _peak_memory(loop),
            "profile": lambda: _profile(loop),
        }
        pipe.send((True, None))
        is_watched = contender != UNWATCHED
        while True:
            command, *arguments = pipe.recv()
            pipe.send((True, commands[command](*arguments)))
            if not is_watched:  # after the warm-up
                switch_off_checks()
                is_watched = True
    except EOFError:
        os._exit(0)  # the benchmark has ended; other ranks end likewise, so nothing waits for them
    except BaseException:
        with suppress(BrokenPipeError):  # the benchmark has read the failure of another rank
            pipe.send((False, traceback.format_exc()))
        os._exit(1)


def _prepare_process(rank: int, size: int, port: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if size == 1:
        return
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "plain_loop",
    }


def _turn(loop: Loop, steps: int) -> tuple[float, float, float]:
    used = time.process_time()
    begin = time.perf_counter()
    loop.take_steps(steps)
    end = time.perf_counter()
    return begin, end, time.process_time() - used


def _peak_memory(loop: Loop) -> int:
    """Return the peak of bytes of tensors in a step beyond those before it."""
    loop._optimizer.zero_grad()  # gradients of the last step are not there before this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop.take_steps(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _profile(loop: Loop) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loop.take_steps(PROFILED_STEPS)
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50)
