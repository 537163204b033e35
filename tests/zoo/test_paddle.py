"""Weights of PaddleViT's ViT in timm's model, and arrays of `.pdparams` files, without execution of their pickles."""

import base64
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file

from helpers.paddle_files import (
    CLASSES,
    DEPTH,
    HEADS,
    PATCH,
    SIZE,
    WIDTH,
    save_state,
    save_training,
    vit_forward,
    vit_state,
)
from samestep.errors import DataError
from samestep.recipes.models import load_all, load_matching
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.paddle import read_arrays, read_pdparams

PROTOCOLS = [2, 3, 4, 5]
# Output of PaddlePaddle 3.3.1: paddle.save(Sequential(Linear(3, 4), LayerNorm(4)).state_dict(), path).
REAL = base64.b64decode(
    "gASV3wEAAAAAAAB9lCiMCDAud2VpZ2h0lIwWbnVtcHkuX2NvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmUjAduZGFycm"
    "F5lJOUSwCFlEMBYpSHlFKUKEsBSwNLBIaUaAWMBWR0eXBllJOUjAJmNJSJiIeUUpQoSwOMATyUTk5OSv////9K/////0sAdJRiiUMwDuqxvlD2"
    "ML+Y3hU/QDVDPWAk3b4C4ZG+wBQ6PGBZTD7U51W/mO0PP6ycmT4M90Y/lHSUYowGMC5iaWFzlGgEaAdLAIWUaAmHlFKUKEsBSwSFlGgRiUMQAA"
    "AAAAAAAAAAAAAAAAAAAJR0lGKMCDEud2VpZ2h0lGgEaAdLAIWUaAmHlFKUKEsBSwSFlGgRiUMQAACAPwAAgD8AAIA/AACAP5R0lGKMBjEuYmlh"
    "c5RoBGgHSwCFlGgJh5RSlChLAUsEhZRoEYlDEAAAAAAAAAAAAAAAAAAAAACUdJRijBtTdHJ1Y3R1cmVkVG9QYXJhbWV0ZXJOYW1lQECUfZQoaA"
    "GMDGxpbmVhcl8wLndfMJRoFowMbGluZWFyXzAuYl8wlGgdjBBsYXllcl9ub3JtXzAud18wlGgkjBBsYXllcl9ub3JtXzAuYl8wlHV1Lg=="
)


def written(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("save", [save_state, save_training])
def test_arrays_are_read_unchanged(tmp_path: Path, protocol: int, save: Callable[..., Path]) -> None:
    state = vit_state()
    arrays_read, left_out = read_arrays(save(tmp_path / "a.pdparams", state, protocol))
    assert list(arrays_read) == list(state)
    for name, array in state.items():
        assert arrays_read[name].dtype == numpy.float64
        assert numpy.array_equal(arrays_read[name], array)
    assert left_out == (() if save is save_state else ("optimizer", "epoch", "scale"))


def test_file_written_by_paddle(tmp_path: Path) -> None:
    path = tmp_path / "real.pdparams"
    path.write_bytes(REAL)
    arrays_read, _ = read_arrays(path)
    assert {name: (array.shape, str(array.dtype)) for name, array in arrays_read.items()} == {
        "0.weight": ((3, 4), "float32"),
        "0.bias": ((4,), "float32"),
        "1.weight": ((4,), "float32"),
        "1.bias": ((4,), "float32"),
    }
    assert arrays_read["0.weight"][0, 0] == pytest.approx(-0.3474888, abs=1e-6)
    assert arrays_read["1.weight"].tolist() == [1, 1, 1, 1]


kinds = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", ">i4", "|i1", "|u1", "|b1"])


@settings(max_examples=80)
@given(
    array=kinds.flatmap(lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))),
    protocol=st.sampled_from(PROTOCOLS),
    is_fortran=st.booleans(),
)
def test_any_plain_array(tmp_path_factory: pytest.TempPathFactory, array: Any, protocol: int, is_fortran: bool) -> None:
    stored = numpy.asfortranarray(array) if is_fortran else array
    path = tmp_path_factory.getbasetemp() / "any.pdparams"
    arrays_read = read_arrays(written(path, {"a": stored}, protocol))[0]["a"]
    assert arrays_read.shape == stored.shape
    assert arrays_read.dtype == array.dtype.newbyteorder("=")
    assert arrays_read.tobytes() == array.astype(arrays_read.dtype).tobytes()


# --- no execution --------------------------------------------------------------------------------------


class Calls:
    """Pickled as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def around(trap: Any) -> list[Any]:
    """Return files with `trap` in every possible position."""
    element = numpy.empty(1, dtype=object)
    element[0] = trap
    return [
        {"a": trap},
        trap,
        {trap: numpy.ones(1)},
        {"a": (trap, numpy.ones(1))},
        {"a": ("a", trap)},
        {"model": OrderedDict(a=[{"b": (1, [trap])}])},
        {"model": {"a": numpy.ones(1)}, "epoch": trap},
        {"a": element},
        {"a": numpy.ones(1), "StructuredToParameterName@@": {"a": trap}},
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_call_is_refused_in_every_position(tmp_path: Path, protocol: int) -> None:
    sprung = tmp_path / "sprung"
    for value in around(Calls(os.system, f"touch {sprung}")):
        with pytest.raises(DataError, match=r"refers to (posix|nt)\.system") as error:
            read_arrays(written(tmp_path / "trap.pdparams", value, protocol))
        assert "nothing was executed" in str(error.value.expected)
    assert not sprung.exists()


def named(module: str, name: str, argument: bytes) -> bytes:
    """A pickle that calls `module.name(argument)`."""
    return b"\x80\x02}X\x01\x00\x00\x00ac" + f"{module}\n{name}\n".encode() + argument + b"\x85Rs."


TEXT = b"X\x04\x00\x00\x00data"
FORBIDDEN = [
    ("builtins", "eval"),
    ("__builtin__", "getattr"),
    ("os", "system"),
    ("copyreg", "_reconstructor"),
    ("numpy", "load"),
    ("numpy._core.multiarray", "fromfile"),
    ("numpy", "dtype.__class__"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("_codecs", "decode"),
]


def test_every_other_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trap.pdparams"
    for module, name in FORBIDDEN:
        path.write_bytes(named(module, name, TEXT))
        with pytest.raises(DataError, match=f"refers to {module}.{name}".replace(".", r"\.")):
            read_arrays(path)


ODD = [
    b"\x80\x02}X\x01\x00\x00\x00aX\x01\x00\x00\x00bQs.",  # a persistent object
    b"\x80\x02}X\x01\x00\x00\x00a\x82\x01s.",  # an extension
    named("_codecs", "encode", TEXT + b"X\x05\x00\x00\x00rot13").replace(b"\x85R", b"\x86R"),
    b"\x80\x02}X\x01\x00\x00\x00ac_codecs\nencode\n}X\x01\x00\x00\x00bK\x01sbs.",  # state of a function
    b"\x80\x02}X\x01\x00\x00\x00acnumpy\nndarray\nN}X\x05\x00\x00\x00shapeK\x01s\x86bs.",  # state of a class
    b"\x80\x02}X\x01\x00\x00\x00acnumpy\nndarray\n)Rs.",  # an array without a state
    b"",
    b"these are no weights",
]


def test_odd_pickles_are_refused_without_side_effects(tmp_path: Path) -> None:
    path = tmp_path / "odd.pdparams"
    for content in ODD:
        path.write_bytes(content)
        with pytest.raises(DataError, match=str(path)):
            read_arrays(path)
    assert read_arrays(save_state(tmp_path / "good.pdparams", vit_state()))[0]


WRONG: list[Any] = [
    {"a": numpy.array([None, 1], dtype=object)},
    {"a": numpy.array(["x"])},
    {"a": numpy.zeros(2, dtype=[("x", "<f4"), ("y", "<i4")])},
    {"a": numpy.array(["2020-01-01"], dtype="M8[D]")},
    {"a": numpy.ones(2, dtype=complex)},
    {"a": numpy.ones(2, dtype=numpy.uint16)},  # bfloat16
    {"a": [1.0, 2.0]},
    {"a": {"b": numpy.ones(1)}},
    numpy.ones(3),
    [numpy.ones(3)],
    {3: numpy.ones(1)},
]


def test_other_values_are_refused(tmp_path: Path) -> None:
    for value in WRONG:
        with pytest.raises(DataError) as error:
            read_arrays(written(tmp_path / "a.pdparams", value))
        assert error.value.code == "E_UNREADABLE"


class Forged:
    """Array whose state contradicts its content."""

    def __init__(self, shape: Any, kind: Any, content: Any) -> None:
        self._state = (1, shape, kind, False, content)

    def __reduce__(self) -> tuple[Any, ...]:
        function, arguments, _ = numpy.ones(1).__reduce__()
        return function, arguments, self._state


FLOAT = numpy.dtype("<f4")
FORGED = [
    ((4,), FLOAT, b"\0" * 12),
    ((2**40, 2**40), FLOAT, b"\0" * 16),
    ((-1, -4), FLOAT, b"\0" * 16),
    ((4.0,), FLOAT, b"\0" * 16),
    (4, FLOAT, b"\0" * 16),
    ((4,), FLOAT, [1.0, 2.0, 3.0, 4.0]),
    ((4,), "f4", b"\0" * 16),
    ((4,), None, b"\0" * 16),
    ((True,), FLOAT, b"\0" * 4),
]


def test_forged_arrays_are_refused(tmp_path: Path) -> None:
    for forged in FORGED:
        with pytest.raises(DataError):
            read_arrays(written(tmp_path / "a.pdparams", {"a": Forged(*forged)}))


@settings(max_examples=300)
@given(place=st.integers(0, len(REAL) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_file_raises_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pdparams"
    path.write_bytes(REAL[:place] if cut else REAL[:place] + bytes([byte]) + REAL[place + 1 :])
    try:
        arrays_read, _ = read_arrays(path)
    except DataError:
        return
    assert all(isinstance(array, numpy.ndarray) for array in arrays_read.values())


def timm_vit(*, bias: bool = True, classes: int = CLASSES) -> torch.nn.Module:
    make_torchvision_importable()
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        model: torch.nn.Module = VisionTransformer(
            img_size=SIZE,
            patch_size=PATCH,
            num_classes=classes,
            embed_dim=WIDTH,
            depth=DEPTH,
            num_heads=HEADS,
            qkv_bias=bias,
        )
    return model.double().eval()


@pytest.mark.parametrize("save", [save_state, save_training])
@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_equal_those_of_paddle(tmp_path: Path, save: Callable[..., Path], old_names: bool, bias: bool) -> None:
    """In 64 bits, against PaddleViT's forward pass in NumPy; the largest of 15 logits is some units."""
    state = vit_state(1, old_names=old_names, bias=bias)
    images = numpy.random.default_rng(2).normal(size=(3, 3, SIZE, SIZE))
    model = timm_vit(bias=bias)
    load_all(model, save(tmp_path / "vit.pdparams", state))
    with torch.no_grad():
        logits = model(torch.from_numpy(images)).numpy()
    expected = vit_forward(state, images)
    assert numpy.abs(expected).max() > 1
    assert numpy.abs(logits - expected).max() < 1e-10


def test_every_array_maps_to_one_tensor(tmp_path: Path) -> None:
    """Each array is read once and sets one tensor of timm's model."""
    state = vit_state(3)
    converted = read_pdparams(save_state(tmp_path / "vit.pdparams", state))
    assert sorted(converted.sources.values()) == sorted(state)
    assert set(converted.tensors) == set(timm_vit().state_dict())
    for name, tensor in converted.tensors.items():
        array = state[converted.sources[name]]
        is_matrix = array.ndim == 2 and name.endswith(".weight")
        assert numpy.array_equal(tensor.numpy(), array.T if is_matrix else array)
        assert tensor.is_contiguous()


def test_array_without_a_name_of_its_own_is_refused(tmp_path: Path) -> None:
    for name in ("pre_logits.0.weight", "classifier.0.weight", "dist_token", "patch_embedding.cls_token"):
        path = save_state(tmp_path / "vit.pdparams", {**vit_state(), name: numpy.ones((2, 2))})
        with pytest.raises(DataError, match=re.escape(name)) as error:
            read_pdparams(path)
        assert error.value.code == "E_WEIGHTS"


def test_pretrained_file_can_be_a_paddle_file(tmp_path: Path) -> None:
    """With another number of classes the head is left out and reported."""
    model = timm_vit(classes=7)
    notes = load_matching(model, save_state(tmp_path / "vit.pdparams", vit_state()))
    assert notes == [
        f"pretrained: {len(model.state_dict()) - 2} tensors taken, 2 left out",
        "  left out head.weight: (7, 12) here, (5, 12) in the file",
        "  left out head.bias: (7,) here, (5,) in the file",
    ]


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    model = timm_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {**before, "extra": torch.zeros(1), "pos_embed": torch.zeros(1, 9, WIDTH)}
    del state["norm.bias"], state["head.bias"]
    save_file(state, tmp_path / "half.safetensors")
    with pytest.raises(DataError) as error:
        load_all(model, tmp_path / "half.safetensors")
    assert "2 missing (norm.bias, head.bias)" in error.value.value
    assert "1 of another shape (pos_embed: (1, 5, 12) here, (1, 9, 12) in the file)" in error.value.value
    assert "1 only in the file (extra)" in error.value.value
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
