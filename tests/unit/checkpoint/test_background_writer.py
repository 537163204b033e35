"""Background writing: the saved state is that of the call, every failure is raised."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.simulated_accelerator import simulated_accelerator
from samestep.checkpoint.background_writer import AsyncCheckpointWriter, HostBuffers, SavedCheckpoint, TensorFile
from samestep.checkpoint.contents import Progress, Training
from samestep.checkpoint.state import MODEL, pack, snapshot
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import CheckpointWriteError, InputError


class GatedFolder(CheckpointFolder):
    """Folder with a configurable slow or full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep=9)
        self.gate = threading.Event()
        self.gate.set()
        self.is_full = False

    def write(self, step: int, files: object, *, is_best: bool = False, epoch: int | None = None) -> Path:
        assert self.gate.wait(20)
        if self.is_full:
            raise CheckpointWriteError(f"no space for step {step}")
        return super().write(step, files, is_best=is_best, epoch=epoch)  # type: ignore[arg-type]

    @contextmanager
    def slow(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


@pytest.fixture
def folder(tmp_path: Path) -> GatedFolder:
    return GatedFolder(tmp_path)


def steps(folder: CheckpointFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.steps()]


def test_save_returns_before_the_write_and_reports_the_checkpoint(folder: GatedFolder) -> None:
    checkpoints: list[SavedCheckpoint] = []
    state = bytearray(b"one")
    writer = AsyncCheckpointWriter(folder, checkpoints.append)
    with folder.slow():
        writer.save(1, lambda _: {"a": bytes(state)}, is_best=True)
        state[:] = b"two"
        writer.poll()
        assert not checkpoints
        assert not folder.steps()
    writer.wait()
    assert [(saved.step, saved.is_best) for saved in checkpoints] == [(1, True)]
    assert checkpoints[0].seconds > 0
    assert (folder.find("best") / "a").read_bytes() == b"one"
    writer.wait()
    assert len(checkpoints) == 1


def test_save_waits_for_the_previous_one(folder: GatedFolder) -> None:
    checkpoints: list[SavedCheckpoint] = []
    heartbeats: list[None] = []
    writer = AsyncCheckpointWriter(folder, checkpoints.append, lambda: heartbeats.append(None))
    folder.gate.clear()
    writer.save(1, lambda _: {"a": b"1"})
    timer = threading.Timer(1, folder.gate.set)
    timer.start()

    def second(_: HostBuffers) -> dict[str, bytes]:
        assert steps(folder) == [1], "two copies of the state at a time"
        return {"a": b"2"}

    writer.save(2, second)
    assert [saved.step for saved in checkpoints] == [1]
    assert heartbeats
    writer.wait()
    timer.join()
    assert steps(folder) == [1, 2]


@pytest.mark.parametrize("call", ["poll", "wait", "save", "leave"])
def test_a_failure_is_raised_once_by_the_next_call(folder: GatedFolder, call: str) -> None:
    writer = AsyncCheckpointWriter(folder, lambda saved: None)
    folder.is_full = True
    writer.save(1, lambda _: {"a": b"1"})
    assert writer._thread is not None
    writer._thread.join()
    with pytest.raises(CheckpointWriteError, match="no space for step 1"):
        if call == "poll":
            writer.poll()
        elif call == "wait":
            writer.wait()
        elif call == "save":
            writer.save(2, lambda _: pytest.fail("the state was copied needlessly"))
        else:
            with writer:
                pass
    writer.poll()
    writer.wait()


def test_end_of_block_waits(folder: GatedFolder) -> None:
    with AsyncCheckpointWriter(folder, lambda saved: None) as writer:
        writer.save(1, lambda _: {"a": b"1"})
    assert steps(folder) == [1]


def test_error_in_the_block_waits_and_reports_both_errors(folder: GatedFolder) -> None:
    with pytest.raises(InputError) as raised, AsyncCheckpointWriter(folder, lambda saved: None) as writer:
        writer.save(1, lambda _: {"a": b"1"})
        raise InputError("no such color")
    assert steps(folder) == [1]
    assert not hasattr(raised.value, "__notes__")

    folder.is_full = True
    with pytest.raises(InputError) as raised, AsyncCheckpointWriter(folder, lambda saved: None) as writer:
        writer.save(2, lambda _: {"a": b"1"})
        raise InputError("no such color")
    assert raised.value.__notes__ == ["no space for step 2 [E_CHECKPOINT_WRITE]"]


def test_a_failed_copy_of_the_state_starts_no_write(folder: GatedFolder) -> None:
    writer = AsyncCheckpointWriter(folder, lambda saved: None)
    with pytest.raises(MemoryError):
        writer.save(1, no_memory)
    writer.wait()
    assert not folder.steps()


def no_memory(_: HostBuffers) -> dict[str, bytes]:
    raise MemoryError


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
SHAPES = [(), (0,), (2, 0, 3), (3,), (5, 7), (700, 800)]


class Net(nn.Module):
    """Model with tied weights, a transposed weight, and buffers without elements or dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(3))


class Copies(TorchDispatchMode):
    """Counts the copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy", "cat"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def trained() -> Training:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    run = Training(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False))
    step(run)
    return run


def step(run: Training) -> None:
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()


def memory(buffers: HostBuffers) -> set[int]:
    return {buffer.data_ptr() for same in buffers._used.values() for buffer in same if buffer.numel()}


def test_a_file_has_the_bytes_of_safetensors() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            size = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 2, (size,), dtype=torch.uint8, generator=generator)
            tensors[f'{shape} "é\\\n\x7f" 😀/{dtype}'] = data.view(dtype).reshape(shape)
    pieces = list(TensorFile(tensors))
    assert b"".join(pieces) == save(tensors)
    assert len(pieces) < 2 * len(DTYPES), "small tensors are not joined"
    assert b"".join(TensorFile({})) == save({})


def test_large_tensors_are_written_from_their_memory() -> None:
    tensor = torch.zeros(1_000_000)
    file = TensorFile({"a": tensor})
    tensor[-1] = 1.0  # after the file is made, which a copy would miss
    assert load(b"".join(file))["a"][-1] == 1.0
    assert any(isinstance(piece, memoryview) and piece.nbytes == tensor.nbytes for piece in file)


def test_a_snapshot_copies_each_tensor_once_and_reuses_the_memory() -> None:
    run, buffers = trained(), HostBuffers()
    slots = sum(len(state) for state in run.optimizer.state.values())
    with Copies() as copies:
        snapshot(run, lambda: Progress(step=1), buffers)
    assert copies.names == ["copy_"] * (4 + slots), "not one copy of the distinct tensors of the model and each slot"
    first = memory(buffers)
    buffers.reuse()
    files = snapshot(run, lambda: Progress(step=1), buffers)
    assert memory(buffers) == first
    assert {name: b"".join([data] if isinstance(data, bytes) else data) for name, data in files.items()} == pack(
        run, Progress(step=1)
    )


def test_copies_in_use_are_not_overwritten() -> None:
    buffers, tensor = HostBuffers(), torch.zeros(3)
    first = buffers.copy(tensor)
    second = buffers.copy(tensor + 1)
    assert (first.tolist(), second.tolist()) == ([0.0] * 3, [1.0] * 3)


def test_memory_of_vanished_tensors_is_freed() -> None:
    buffers = HostBuffers()
    buffers.copy(torch.zeros(3))
    for _ in range(2):
        buffers.reuse()
        buffers.copy(torch.zeros(4))
    assert sum(map(len, [*buffers._free.values(), *buffers._used.values()])) == 1


def test_checkpoints_of_an_accelerator_have_the_state_of_their_save(folder: GatedFolder) -> None:
    with simulated_accelerator() as accelerator:
        run = trained()
        states = []
        with AsyncCheckpointWriter(folder, lambda saved: None) as writer:
            for number in (1, 2):
                states.append({name: tensor.clone() for name, tensor in run.model.state_dict().items()})
                accelerator.counts.clear()
                with folder.slow():
                    writer.save(number, lambda buffers: snapshot(run, lambda: Progress(step=1), buffers))
                    step(run)  # before the copies are complete
                    counts = dict(accelerator.counts)
                writer.wait()
                # 4 distinct tensors of the model, and 3 slots of each of 2 parameters
                assert counts["copies to the host"] == 10
                assert counts.get("page-locked", 0) == (10 if number == 1 else 0), "memory is not reused"
    assert not accelerator.races
    for number, state in enumerate(states, 1):
        saved = load((folder.find(str(number)) / MODEL).read_bytes())
        assert saved.keys() == state.keys() - {"out.weight"}
        assert all(torch.equal(saved[name], state[name]) for name in saved)


def test_saves_of_an_accelerator_do_not_wait_in_the_training_thread(tmp_path: Path) -> None:
    with simulated_accelerator() as accelerator:
        run, buffers = trained(), HostBuffers()
        accelerator.counts.clear()
        snapshot(run, lambda: Progress(step=1), buffers)
        assert accelerator.counts["synchronize"] == 0
        buffers.wait()
        assert accelerator.counts["synchronize"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.gpu
def test_copies_of_a_gpu_are_complete_after_the_wait() -> None:
    buffers, tensor = HostBuffers(), torch.ones(1 << 24, device="cuda")
    copied = buffers.copy(tensor)
    tensor.zero_()
    assert copied.is_pinned()
    buffers.wait()
    assert bool(copied.eq(1).all())
