"""Files as `paddle.save` writes them, and PaddleViT's ViT in NumPy: Paddle's names, layout and order of operations."""

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]
State = dict[str, Array]

WIDTH, HEADS, DEPTH, PATCH, SIZE, CLASSES = 12, 3, 2, 4, 8, 5
_erf = numpy.vectorize(math.erf)


def vit_state(seed: int = 0, *, old_names: bool = False, bias: bool = True) -> State:
    """Weights of a small ViT as `model.state_dict()` has them: linear layers as (in, out)."""
    draw = numpy.random.default_rng(seed)

    def new(*shape: int) -> Array:
        return draw.normal(size=shape) * 0.5

    tokens = (SIZE // PATCH) ** 2 + 1
    state = {
        "patch_embedding.cls_token" if old_names else "cls_token": new(1, 1, WIDTH),
        "patch_embedding.position_embeddings" if old_names else "position_embedding": new(1, tokens, WIDTH),
        "patch_embedding.patch_embedding.weight": new(WIDTH, 3, PATCH, PATCH),
        "patch_embedding.patch_embedding.bias": new(WIDTH),
    }
    linear = {"attn.qkv": (WIDTH, 3 * WIDTH), "attn.out": (WIDTH, WIDTH)}
    linear |= {"mlp.fc1": (WIDTH, 4 * WIDTH), "mlp.fc2": (4 * WIDTH, WIDTH)}
    for block in range(DEPTH):
        stem = f"encoder.layers.{block}"
        for norm in ("attn_norm", "mlp_norm"):
            state |= {f"{stem}.{norm}.weight": 1 + new(WIDTH), f"{stem}.{norm}.bias": new(WIDTH)}
        for name, shape in linear.items():
            state[f"{stem}.{name}.weight"] = new(*shape)
            if bias or name != "attn.qkv":
                state[f"{stem}.{name}.bias"] = new(shape[1])
    state |= {"encoder.encoder_norm.weight": 1 + new(WIDTH), "encoder.encoder_norm.bias": new(WIDTH)}
    return state | {"classifier.weight": new(WIDTH, CLASSES), "classifier.bias": new(CLASSES)}


def vit_forward(state: State, images: Array) -> Array:
    """Logits of PaddleViT's ViT, in evaluation, written from its published architecture."""
    cls = state.get("cls_token", state.get("patch_embedding.cls_token"))
    places = state.get("position_embedding", state.get("patch_embedding.position_embeddings"))
    assert cls is not None
    assert places is not None
    patches = _patches(state, images)
    features = numpy.concatenate([numpy.repeat(cls, len(images), axis=0), patches], axis=1) + places
    for block in range(DEPTH):
        stem = f"encoder.layers.{block}"
        features = features + _attention(state, f"{stem}.attn", _norm(state, f"{stem}.attn_norm", features))
        features = features + _mlp(state, f"{stem}.mlp", _norm(state, f"{stem}.mlp_norm", features))
    return _linear(state, "classifier", _norm(state, "encoder.encoder_norm", features)[:, 0])


def _patches(state: State, images: Array) -> Array:
    """A convolution whose kernel is as large as its stride, patch by patch, row by row."""
    kernel, bias = state["patch_embedding.patch_embedding.weight"], state["patch_embedding.patch_embedding.bias"]
    rows = []
    for top in range(0, SIZE, PATCH):
        for left in range(0, SIZE, PATCH):
            patch = images[:, :, top : top + PATCH, left : left + PATCH]
            rows.append(numpy.einsum("nchw,ochw->no", patch, kernel) + bias)
    return numpy.stack(rows, axis=1)


def _linear(state: State, name: str, inputs: Array) -> Array:
    outputs: Array = inputs @ state[f"{name}.weight"]
    return outputs + state.get(f"{name}.bias", 0.0)


def _norm(state: State, name: str, inputs: Array) -> Array:
    centred = inputs - inputs.mean(axis=-1, keepdims=True)
    scaled = centred / numpy.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    outputs: Array = scaled * state[f"{name}.weight"] + state[f"{name}.bias"]
    return outputs


def _attention(state: State, name: str, inputs: Array) -> Array:
    samples, tokens, _ = inputs.shape

    def by_head(part: Array) -> Array:
        return part.reshape(samples, tokens, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)

    query, key, value = map(by_head, numpy.split(_linear(state, f"{name}.qkv", inputs), 3, axis=-1))
    scores = query @ key.transpose(0, 1, 3, 2) * (WIDTH // HEADS) ** -0.5
    weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return _linear(state, f"{name}.out", (weights @ value).transpose(0, 2, 1, 3).reshape(samples, tokens, WIDTH))


def _mlp(state: State, name: str, inputs: Array) -> Array:
    hidden = _linear(state, f"{name}.fc1", inputs)
    return _linear(state, f"{name}.fc2", hidden * 0.5 * (1 + _erf(hidden / numpy.sqrt(2))))


class _Tensor:
    """Pickled as Paddle pickles a tensor: a call of `tuple` with its name and its array."""

    def __init__(self, name: str, array: Array) -> None:
        self._pair = (name, array)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return tuple, (self._pair,)


def save_state(path: Path, state: State, protocol: int = 4) -> Path:
    """`paddle.save(model.state_dict(), path)`: arrays, and Paddle's own names under a key of their own."""
    names = {"StructuredToParameterName@@": {name: f"linear_{place}.w_0" for place, name in enumerate(state)}}
    path.write_bytes(pickle.dumps({**state, **names}, protocol))
    return path


def save_training(path: Path, state: State, protocol: int = 4) -> Path:
    """`paddle.save({"model": model.state_dict(), ...}, path)`, as PaddleViT writes while it trains."""
    model = OrderedDict(
        (name, _Tensor(f"linear_{place}.w_0", array)) for place, (name, array) in enumerate(state.items())
    )
    rest = {"optimizer": {"LR_Scheduler": {"last_lr": 0.1}}, "epoch": 3, "scale": _Tensor("s", numpy.ones(1))}
    path.write_bytes(pickle.dumps({"model": model, **rest}, protocol))
    return path
