"""Arrays out of a `.pdparams` file, which is a pickle; nothing that a pickle could name is run.

A pickle is a program that names functions and calls them. Here it finds a few names only, those that arrays are made
of, and behind each of them stands something of this file that keeps what it is given. What was kept is checked and
made into arrays afterwards, so that neither Paddle nor NumPy sees a byte that was not looked at.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from samestep.errors import DataError

# What Paddle adds to a state dict: names of its own for the arrays, and the parts of arrays over a gigabyte.
_NAMES, _PARTS = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "f2", "f4", "f8")
_DO = "save it again where it was made: paddle.save(model.state_dict(), FILE)"


@dataclass(frozen=True)
class Arrays:
    """What a file holds.

    Attributes:
        by_name: the model's arrays.
        left_out: what stands beside the model, such as an optimizer's state.
    """

    by_name: dict[str, NDArray[Any]]
    left_out: tuple[str, ...]


def read_arrays(file: Path) -> Arrays:
    """The arrays of a state dict, or those under `model` in a checkpoint of PaddleViT's.

    Raises:
        DataError: the file cannot be read, asks for anything but arrays, or holds anything else.
    """
    try:
        with file.open("rb") as opened:
            found = _Reader(opened).load()
    except DataError:
        raise
    except Exception as error:  # readers of damaged pickles raise of every kind, each of them means this
        raise DataError(
            f"{file} cannot be read: {type(error).__name__}: {error}", rule="a whole file of paddle.save", do=_DO
        ) from error
    if not isinstance(found, dict):
        raise _other(file, "it", found)
    left_out: tuple[str, ...] = ()
    if isinstance(found.get("model"), dict):
        left_out = tuple(str(name) for name in found if name != "model")
        found = found["model"]
    if _PARTS in found:
        raise DataError(
            f"{file} holds arrays in parts, as protocol 2 and 3 have them above a gigabyte",
            rule="one array a name",
            do="paddle.save(model.state_dict(), FILE, protocol=4)",
        )
    return Arrays({name: _array(file, name, value) for name, value in found.items() if name != _NAMES}, left_out)


class _Element:
    """Stands for a `numpy.dtype`."""

    def __init__(self, code: Any, *rest: Any) -> None:
        self.code, self.order, self.is_plain = code, "=", True

    def __setstate__(self, state: Any) -> None:
        _, self.order, *others = state[:5]
        self.is_plain = others == [None, None, None]


class _Array:
    """Stands for a `numpy.ndarray`, which a pickle makes empty and then tells its state."""

    shape: Any = None
    element: Any = None
    by_columns: Any = False
    content: Any = b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.element, self.by_columns, self.content = state


class _Reader(pickle.Unpickler):
    """An unpickler that knows the names below; any other ends it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin1")  # what Python 2 wrote as text
        self._file = file.name
        self._known = _known_names()

    def find_class(self, module: str, name: str) -> Any:
        """What stands for `module.name`."""
        if (module, name) not in self._known:
            raise DataError(
                f"{self._file} asks for {module}.{name}",
                rule="a .pdparams file names what arrays are made of, and nothing else; it was not run",
                do=f"do not open it with anything that would; {_DO}",
            )
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse what another file would have to supply."""
        raise DataError(f"{self._file} refers to something outside, {pid!r}", rule="a file of weights is whole", do=_DO)


def _known_names() -> dict[tuple[str, str], Any]:
    """A dictionary for one file; its classes are made anew, since a pickle can set attributes of what it finds."""
    array = type("_Array", (_Array,), {})
    element = type("_Element", (_Element,), {})

    def reconstruct(kind: Any, *rest: Any) -> Any:
        return array()

    def from_buffer(content: Any, kind: Any, shape: Any, order: Any) -> Any:
        made = array()
        made.__setstate__((1, shape, kind, order == "F", content))
        return made

    def scalar(kind: Any, content: Any = b"") -> Any:
        return from_buffer(content, kind, (), "C")

    def encode(text: Any, encoding: Any = "latin1") -> bytes:
        if encoding != "latin1":
            raise ValueError(f"bytes in {encoding!r}")
        return bytes(text, "latin1")

    def no_bytes() -> bytes:
        return b""

    known: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): array,
        ("numpy", "dtype"): element,
        ("_codecs", "encode"): encode,  # how protocol 2 writes bytes, and none of them
        ("builtins", "bytes"): no_bytes,
        ("__builtin__", "bytes"): no_bytes,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "tuple"): tuple,  # how Paddle writes a tensor: tuple((name, array))
        ("__builtin__", "tuple"): tuple,
    }
    for room in ("numpy.core", "numpy._core"):
        known[f"{room}.multiarray", "_reconstruct"] = reconstruct
        known[f"{room}.multiarray", "scalar"] = scalar
        known[f"{room}.numeric", "_frombuffer"] = from_buffer
    return known


def _array(file: Path, name: Any, value: Any) -> NDArray[Any]:
    said = value[1] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) else value
    if not isinstance(name, str) or not isinstance(said, _Array) or not isinstance(said.element, _Element):
        raise _other(file, repr(name), value)
    content = said.content.encode("latin1") if isinstance(said.content, str) else said.content
    element, shape = said.element, said.shape
    is_known = element.is_plain and element.code in _CODES and element.order in ("<", ">", "=", "|")
    if not is_known:
        raise DataError(
            f"{file}: {name} has elements of the kind {element.code!r}",
            rule=f"one of {', '.join(_CODES)}",
            do="save plain numbers",
        )
    if element.code == "u2":
        raise DataError(
            f"{file}: {name} has whole numbers of 16 bits, which is how Paddle saves bfloat16",
            rule="weights are of 32 bits, or 16 as float16",
            do="model.float() before paddle.save",
        )
    kind = numpy.dtype(element.order + element.code)
    is_shape = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) * kind.itemsize:
        raise DataError(f"{file}: {name} is damaged", rule="as many bytes as its shape says", do=_DO)
    flat = numpy.frombuffer(content, kind)
    return flat.reshape(shape, order="F" if said.by_columns else "C").astype(kind.newbyteorder("="))


def _other(file: Path, name: str, value: Any) -> DataError:
    what = "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    return DataError(f"{file}: {name} is {what}", rule="names of arrays to arrays, as in model.state_dict()", do=_DO)
