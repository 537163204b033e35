"""Modes of a thread in another one."""

from threading import Thread
from typing import Any

import torch

from samestep.view.thread_modes import ThreadModes

CPU = torch.device("cpu")


def in_thread(modes: ThreadModes) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def compute() -> None:
        with modes.installed():
            x = torch.ones(2, 2, requires_grad=True)
            y = x @ x
            found.update(
                grad=y.requires_grad,
                dtype=y.dtype,
                inference=torch.is_inference_mode_enabled(),
                device=torch.ones(1).device.type,
            )

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    return found


def test_plain_modes() -> None:
    expected = {"grad": True, "dtype": torch.float32, "inference": False, "device": "cpu"}
    assert in_thread(ThreadModes(CPU)) == expected


def test_modes_of_the_caller() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = in_thread(ThreadModes(CPU))
    assert (found["grad"], found["dtype"]) == (False, torch.bfloat16)
    with torch.inference_mode():
        assert in_thread(ThreadModes(CPU))["inference"]
    with torch.device("meta"):
        assert in_thread(ThreadModes(CPU))["device"] == "meta"


def test_hooks_of_saved_tensors() -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        modes = ThreadModes(CPU)
    in_thread(modes)
    assert packed == [torch.Size([2, 2])] * 2
