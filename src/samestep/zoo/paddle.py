"""Weights of PaddleViT's ViT under timm's names and in torch's layout.

A `.pdparams` file is a pickle: a program that names functions and calls them. The unpickler here
resolves only the few names that arrays consist of, and maps each of them to a recorder of this
module. The recorded values are validated before they become arrays, so neither Paddle nor NumPy
receives unchecked bytes.
"""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray

from samestep.errors import DataError

_OWN_NAMES = "StructuredToParameterName@@"  # Paddle's addition to a state dict
# Not `u2`, in which Paddle saves bfloat16.
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8")

# Paddle's names to timm's names, for both versions of PaddleViT: in `transformer.py` the class
# token and the position embeddings belong to the patch embedding, in `vit.py` to the model. `{}` is
# the block number.
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
# The other names are modules with a weight and possibly a bias.
_PARAMETERS = ("cls_token", "pos_embed")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Converted:
    """Weights for timm's ViT."""

    tensors: dict[str, torch.Tensor]  # weights by timm's names
    sources: dict[str, str]  # Paddle's name of each tensor
    left_out: tuple[str, ...]  # other keys of the file, such as the state of the optimizer


def read_pdparams(file: Path) -> Converted:
    """Return the weights of a ViT saved by PaddleViT.

    Paddle stores the weight of a linear layer as (in, out), torch as (out, in), so matrices are
    transposed. Convolution kernels (out, in, height, width) and all other arrays have the same
    layout.

    Raises:
        DataError: the file contains anything but arrays, or an array that timm's ViT does not have.
    """
    arrays, left_out = read_arrays(file)
    tensors: dict[str, torch.Tensor] = {}
    sources: dict[str, str] = {}
    for name, array in arrays.items():
        target = timm_name(name)
        if target is None or target in tensors:
            problem = "timm's ViT has no such array"
            if target is not None:
                problem = f"{sources[target]} also maps to {target}"
            known = ", ".join(NAMES).replace("{}", "N")
            raise DataError(
                f"{file}: {name}: {problem}",
                expected=f"one array for each name of PaddleViT's ViT: {known}",
                fix="convert weights of image_classification/ViT; other models and heads of two "
                "layers are not supported",
                code="E_WEIGHTS",
            )
        oriented = array.T if array.ndim == 2 and name.endswith(".weight") else array
        tensors[target] = torch.from_numpy(numpy.ascontiguousarray(oriented))
        sources[target] = name
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
    block = number[0] if number else ""
    return f"{NAMES[stem]}.{ending}".replace("{}", block)


def read_arrays(file: Path) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Return the arrays of a state dict or a checkpoint of PaddleViT, and all other keys.

    Raises:
        DataError: the file cannot be read, or contains anything but arrays.
    """
    try:
        with file.open("rb") as stream:
            content = _Unpickler(stream).load()
        left_out: tuple[str, ...] = ()
        if isinstance(content.get("model"), dict):
            left_out = tuple(str(name) for name in content if name != "model")
            content = content["model"]
        values = {name: value for name, value in content.items() if name != _OWN_NAMES}
        return {name: _array(name, value) for name, value in values.items()}, left_out
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise exceptions of every type
        raise DataError(
            f"{file} cannot be read: {type(error).__name__}: {error}",
            expected="a .pdparams file of arrays only, with a name each; nothing was executed",
            fix="save the weights again: paddle.save(model.state_dict(), FILE)",
            code="E_UNREADABLE",
        ) from error


class _Record:
    """Recorder in place of `numpy.ndarray` and `numpy.dtype`, whose state a pickle sets later."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _array_of(*state: Any) -> _Record:
    """Return an array of the state: version, shape, dtype, whether in Fortran's order, content."""
    result = _Record()
    result.state = state
    return result


def _scalar(kind: _Record, content: bytes = b"") -> _Record:
    return _array_of(1, (), kind, False, content)


def _from_buffer(content: bytes, kind: _Record, shape: Any, order: str) -> _Record:
    return _array_of(1, shape, kind, order == "F", content)


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[str, Any] = {
    "numpy.ndarray": _Record,
    "numpy.dtype": _Record,
    "numpy.core.multiarray._reconstruct": lambda *arguments: _Record(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": _encode,  # bytes in protocol 2; empty bytes are a call of `bytes`
    "builtins.bytes": lambda: b"",
    "builtins.tuple": tuple,  # Paddle stores a tensor as tuple((name, array))
    "collections.OrderedDict": dict,
}
_SYNONYMS = {
    "__builtin__": "builtins",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that raises an error for every name outside of `_ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of `module.name`."""
        known = f"{_SYNONYMS.get(module, module)}.{name}"
        if known not in _ALLOWED:
            raise ValueError(f"the file refers to {module}.{name}")
        return _ALLOWED[known]


def _array(name: Any, value: Any) -> NDArray[Any]:
    record = value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        record = value[1]
    if not isinstance(name, str) or not isinstance(record, _Record):
        raise ValueError(f"{name!r} is no array, but a {type(value).__name__}")
    _, shape, dtype, is_fortran, content = record.state
    code, *_ = dtype.arguments
    _, order, *others = dtype.state[:5]
    if code not in _DTYPES or order not in ("<", ">", "=", "|") or others != [None, None, None]:
        raise ValueError(f"{name} has elements of type {code!r}, not one of {', '.join(_DTYPES)}")
    numpy_dtype = numpy.dtype(order + code)
    is_shape = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    size = math.prod(shape) * numpy_dtype.itemsize if is_shape else -1
    if not isinstance(content, bytes | bytearray) or len(content) != size:
        raise ValueError(f"{name} has another amount of data than its shape")
    # A copy in the byte order of this machine: the buffer of a file cannot be written.
    flat = numpy.frombuffer(content, numpy_dtype).astype(numpy_dtype.newbyteorder("="))
    memory_order: Literal["F", "C"] = "F" if is_fortran else "C"
    return flat.reshape(shape, order=memory_order)
