"""Weights of PaddleViT's ViT under timm's names and in torch's layout.

A `.pdparams` file is a pickle: a program that names functions and calls them. The unpickler here resolves only the few
names that arrays consist of, and maps each of them to a recorder of this module. The recorded values are validated
before they become arrays, so neither Paddle nor NumPy receives unchecked bytes. Time and memory are limited by the size
of the file: a pickle of a few bytes can ask for terabytes, or for a key whose hash takes years.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from numpy.typing import NDArray

from samestep.errors import DataError

# Paddle's additions to a state dict: its own names of the arrays, and parts of arrays above a gigabyte.
_OWN_NAMES, _PARTS = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "f2", "f4", "f8")
# Operations of one pickle; an array takes some 30, whatever its size.
_MAX_OPERATIONS = 300_000
_MAX_TUPLE = 8
_SAVE_AGAIN = "save the weights again: paddle.save(model.state_dict(), FILE)"

# Paddle's names to timm's names, for both versions of PaddleViT: in `transformer.py` the class token and the position
# embeddings belong to the patch embedding, in `vit.py` to the model. `{}` is the block number.
NAMES = {
    "patch_embedding.cls_token": "cls_token",
    "cls_token": "cls_token",
    "patch_embedding.position_embeddings": "pos_embed",
    "position_embedding": "pos_embed",
    "patch_embedding.patch_embedding": "patch_embed.proj",
    "encoder.layers.{}.attn_norm": "blocks.{}.norm1",
    "encoder.layers.{}.attn.qkv": "blocks.{}.attn.qkv",
    "encoder.layers.{}.attn.out": "blocks.{}.attn.proj",
    "encoder.layers.{}.mlp_norm": "blocks.{}.norm2",
    "encoder.layers.{}.mlp.fc1": "blocks.{}.mlp.fc1",
    "encoder.layers.{}.mlp.fc2": "blocks.{}.mlp.fc2",
    "encoder.encoder_norm": "norm",
    "classifier": "head",
}
_PARAMETERS = ("cls_token", "pos_embed")  # the other names are modules with a weight and possibly a bias
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Converted:
    """Weights for timm's ViT."""

    tensors: dict[str, torch.Tensor]  # weights by timm's names
    sources: dict[str, str]  # Paddle's name of each tensor
    left_out: tuple[str, ...]  # other keys of the file, such as the state of the optimizer


def read_pdparams(file: Path) -> Converted:
    """Return the weights of a ViT saved by PaddleViT.

    Paddle stores the weight of a linear layer as (in, out), torch as (out, in), so matrices are transposed.
    Convolution kernels (out, in, height, width) and all other arrays have the same layout.

    Raises:
        DataError: the file contains anything but arrays, or an array that timm's ViT does not have.
    """
    arrays, left_out = read_arrays(file)
    unknown = [name for name in arrays if timm_name(name) is None]
    if unknown:
        raise _error(
            f"{file}: timm's ViT has no {', '.join(unknown[:5])}" + (" ..." if len(unknown) > 5 else ""),
            "names of PaddleViT's ViT: " + ", ".join(NAMES).replace("{}", "N"),
            "convert weights of image_classification/ViT; other models and heads of two layers are not supported",
            "E_WEIGHTS",
        )
    tensors: dict[str, torch.Tensor] = {}
    sources: dict[str, str] = {}
    for name, array in arrays.items():
        target = str(timm_name(name))
        if target in tensors:
            problem = f"{file}: both {sources[target]} and {name} map to {target}"
            raise _error(problem, "one array per name", "remove one of the arrays", "E_WEIGHTS")
        oriented = array.T if array.ndim == 2 and name.endswith(".weight") else array
        tensors[target], sources[target] = torch.from_numpy(numpy.ascontiguousarray(oriented)), name
    return Converted(tensors, sources, left_out)


def timm_name(name: str) -> str | None:
    """Return timm's name of one of Paddle's arrays, or None for unknown names."""
    number = _NUMBER.search(name)
    pattern = _NUMBER.sub("{}", name, count=1)
    stem, _, ending = pattern.rpartition(".")
    if NAMES.get(pattern) in _PARAMETERS:
        return NAMES[pattern]
    if stem not in NAMES or NAMES[stem] in _PARAMETERS or ending not in ("weight", "bias"):
        return None
    return f"{NAMES[stem]}.{ending}".replace("{}", number[0] if number else "")


def read_arrays(file: Path) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Return the arrays of a state dict, or those under `model` in a checkpoint of PaddleViT, and all other keys.

    Raises:
        DataError: the file cannot be read, or contains anything but arrays.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            content = _Unpickler(stream, size).load()
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise exceptions of every type
        problem = f"{file} cannot be read: {type(error).__name__}: {error}"
        raise _error(problem, "an intact file of paddle.save") from error
    if not isinstance(content, dict):
        raise _not_arrays(file, "the content", content)
    left_out: tuple[str, ...] = ()
    if isinstance(content.get("model"), dict):
        left_out = tuple(str(name) for name in content if name != "model")
        content = content["model"]
    if _PARTS in content:
        raise _error(
            f"{file} contains arrays in parts, as pickle protocols 2 and 3 store arrays above a gigabyte",
            "one array per name",
            "paddle.save(model.state_dict(), FILE, protocol=4)",
        )
    arrays = {}
    for name, value in content.items():
        if name != _OWN_NAMES:
            arrays[name] = _array(file, name, value)
            size -= arrays[name].nbytes
            if size < 0:
                raise _error(f"{file} contains the same data several times", "arrays that the file contains once")
    return arrays, left_out


class _DType:
    """Recorder in place of `numpy.dtype`."""

    def __init__(self, code: Any, *rest: Any) -> None:
        self.code, self.order, self.is_plain = code, "=", True

    def __setstate__(self, state: Any) -> None:
        _, self.order, *others = state[:5]
        self.is_plain = others == [None, None, None]


class _Array:
    """Recorder in place of `numpy.ndarray`, which a pickle creates empty before it sets the state."""

    shape: Any = None
    dtype: Any = None
    is_fortran: Any = False
    content: Any = b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.content = state


class _Stream:
    """File for the unpickler, which would allocate memory for any number of bytes that a pickle claims to have."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size
        self.readline = stream.readline

    def read(self, count: int) -> bytes:
        """Return `count` bytes."""
        if count > self._size - self._stream.tell():
            raise EOFError("the file ends early")
        return self._stream.read(count)


class _Unpickler(pickle._Unpickler):
    """Unpickler that raises an error for every name outside of `_allowed_names`, and for endless pickles.

    The implementation in Python: the one in C allocates a table for the largest number of an object, without a limit.
    """

    stack: list[Any]  # operands of the base class since the last mark

    def __init__(self, stream: BinaryIO, size: int) -> None:
        super().__init__(_Stream(stream, size), encoding="latin1")  # bytes that Python 2 wrote as text
        self._file = stream.name
        self._allowed = _allowed_names(size)
        self._operations = 0

    def _check(self, code: int) -> None:
        """Before each operation: count it, and check new keys. The hash of a nested tuple takes exponential time."""
        self._operations += 1
        if self._operations > _MAX_OPERATIONS:
            raise ValueError(f"more than {_MAX_OPERATIONS:,} operations")
        if code in _SET_CODES:
            raise ValueError("the file contains a set")
        if code in _ITEMS_CODES:
            keys = self.stack[-2:-1] if code == pickle.SETITEM[0] else self.stack[::2]
            if not all(type(key) in (str, bytes, int) for key in keys):
                raise ValueError("a key is neither text nor a number")

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of `module.name`."""
        if (module, name) not in self._allowed:
            raise _error(
                f"{self._file} refers to {module}.{name}",
                "a .pdparams file of arrays only; nothing was executed",
                f"do not load this file with pickle; {_SAVE_AGAIN}",
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse a reference to another file."""
        raise _error(f"{self._file} refers to an external object", "a file that contains all of its weights")


_SET_CODES = {code[0] for code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)}
_ITEMS_CODES = {code[0] for code in (pickle.SETITEM, pickle.SETITEMS, pickle.DICT)}


def _checked(code: int, load: Callable[[Any], None]) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        unpickler._check(code)
        load(unpickler)

    return checked


_Unpickler.dispatch = {code: _checked(code, load) for code, load in pickle._Unpickler.dispatch.items()}


def _allowed_names(size: int) -> dict[tuple[str, str], Any]:
    """Return new replacements for one file of `size` bytes; a pickle can set attributes of the classes that it uses."""
    array = type("_Array", (_Array,), {})
    dtype = type("_DType", (_DType,), {})

    def reconstruct(cls: Any, *rest: Any) -> Any:
        return array()

    def from_buffer(content: Any, kind: Any, shape: Any, order: Any) -> Any:
        result = array()
        result.__setstate__((1, shape, kind, order == "F", content))
        return result

    def scalar(kind: Any, content: Any = b"") -> Any:
        return from_buffer(content, kind, (), "C")

    remaining = size

    def encode(text: str, encoding: Any = "latin1") -> bytes:
        nonlocal remaining
        remaining -= len(text)
        if encoding != "latin1" or remaining < 0:
            raise ValueError("bytes in another encoding, or the same bytes several times")
        return bytes(text, "latin1")

    def short_tuple(values: Any) -> tuple[Any, ...]:
        if len(values) > _MAX_TUPLE:
            raise ValueError("a long tuple in place of a tensor")
        return tuple(values)

    def empty_bytes() -> bytes:
        return b""

    def empty_dict() -> dict[Any, Any]:
        return {}

    allowed: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): array,
        ("numpy", "dtype"): dtype,
        ("_codecs", "encode"): encode,  # bytes in protocol 2; empty bytes are a call of `bytes`
        ("collections", "OrderedDict"): empty_dict,
    }
    for builtins in ("builtins", "__builtin__"):
        allowed[builtins, "bytes"] = empty_bytes
        allowed[builtins, "tuple"] = short_tuple  # Paddle stores a tensor as tuple((name, array))
    for package in ("numpy.core", "numpy._core"):
        allowed[f"{package}.multiarray", "_reconstruct"] = reconstruct
        allowed[f"{package}.multiarray", "scalar"] = scalar
        allowed[f"{package}.numeric", "_frombuffer"] = from_buffer
    return allowed


def _array(file: Path, name: Any, value: Any) -> NDArray[Any]:
    array = value[1] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) else value
    if not isinstance(name, str) or not isinstance(array, _Array) or not isinstance(array.dtype, _DType):
        raise _not_arrays(file, repr(name), value)
    content = array.content.encode("latin1") if isinstance(array.content, str) else array.content
    dtype, shape = array.dtype, array.shape
    if not (dtype.is_plain and dtype.code in _DTYPES and dtype.order in ("<", ">", "=", "|")):
        kind = dtype.code if isinstance(dtype.code, str) else type(dtype.code).__name__
        problem = f"{file}: {name} has elements of type {kind!r}"
        raise _error(problem, f"one of the types {', '.join(_DTYPES)}", "save plain numbers")
    if dtype.code == "u2":
        problem = f"{file}: {name} contains 16-bit integers, the format in which Paddle saves bfloat16"
        raise _error(problem, "weights in float32 or float16", "model.float() before paddle.save")
    numpy_dtype = numpy.dtype(dtype.order + dtype.code)
    is_shape = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 2**48 for size in shape)
    size = math.prod(shape) * numpy_dtype.itemsize if is_shape else -1
    if not isinstance(content, bytes | bytearray) or len(content) != size:
        raise _error(f"{file}: {name} is damaged", "as much data as its shape")
    flat = numpy.frombuffer(content, numpy_dtype)
    return flat.reshape(shape, order="F" if array.is_fortran else "C").astype(numpy_dtype.newbyteorder("="))


def _not_arrays(file: Path, name: str, value: Any) -> DataError:
    kind = "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    return _error(f"{file}: {name} is {kind}", "a mapping of names to arrays, as in model.state_dict()")


def _error(problem: str, expected: str, fix: str = _SAVE_AGAIN, code: str = "E_UNREADABLE") -> DataError:
    return DataError(problem, expected, fix, code=code)
