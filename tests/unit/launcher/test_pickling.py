"""Functions of notebooks and results are sent by value."""

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from samestep.errors import InputError, RunError
from samestep.launcher.pickling import ByName, pack, portable, unpack

# As in an interactive interpreter: __main__ has no file. The second process has none of the first one's objects.
INTERACTIVE = """
import subprocess, sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from samestep.launcher.pickling import ByValue, portable

class Word:
    def __init__(self, text):
        self.text = text

base = 40
def add(word, number):
    return f"{word.text} {base + number}"

sent = portable(partial(add, Word("sum")))
assert isinstance(sent, ByValue)
data = bytes(ForkingPickler.dumps(sent))
code = "import sys; from multiprocessing.reduction import ForkingPickler as f"
code += "; print(f.loads(sys.stdin.buffer.read())(2))"
print(subprocess.check_output([sys.executable, "-c", code], input=data).decode().strip())

lock = __import__("threading").Lock()
def locked():
    return lock
try:
    ForkingPickler.dumps(portable(locked))
except Exception as error:
    print(type(error).__name__, error)
"""


def named() -> int:
    return 1


@pytest.mark.parametrize("function", [named, math.sqrt, partial(named), ByName("math", "sqrt"), dict])
def test_importable_functions_are_unchanged(function: Callable[..., Any]) -> None:
    assert portable(function) is function


@pytest.mark.parametrize("function", [lambda: 1, partial(lambda: 1)])
def test_local_functions_are_rejected(function: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="E_NOT_PICKLABLE"):
        portable(function)


def test_function_of_an_interactive_main_is_sent_with_its_variables() -> None:
    done = subprocess.run([sys.executable, "-c", INTERACTIVE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first == "sum 42"
    assert second.startswith("InputError the function cannot be sent to ranks: ")


def test_tensors_are_sent_by_value() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    model = torch.nn.Linear(2, 2)
    value = {"a": [tensor, tensor.t()], "b": model, "c": torch.tensor([1.0], dtype=torch.bfloat16), "d": {1, 2}}
    received = unpack(pack(value))
    assert torch.equal(received["a"][0], tensor)
    assert torch.equal(received["a"][1], tensor.t())
    assert torch.equal(received["b"].weight, model.weight)
    assert isinstance(received["b"].weight, torch.nn.Parameter)
    assert received["c"].dtype == torch.bfloat16
    assert received["d"] == {1, 2}
    assert received["a"][0].data_ptr() != tensor.data_ptr()
    assert not received["a"][0].is_shared()


@pytest.mark.parametrize("value", [threading.Lock(), [iter([threading.Lock()])], {"a": (i for i in "ab")}])
def test_unpicklable_result_is_named(value: Any) -> None:
    with pytest.raises(RunError, match=f"the result of the function \\({type(value).__name__}\\) cannot be sent"):
        pack(value)
