"""What of PaddleViT's settings no recipe can say, and values of the wrong kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.errors import RecipeError
from samestep.tools.convert.keys import DEFAULTS

_NUMBER, _WHOLE, _LIST = (int, float), (int,), (list, tuple)
# Kinds of the keys whose default is None, as far as they decide something.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "DATA.DATA_PATH": (str,),
    "MODEL.PRETRAINED": (str,),
    "MODEL.NUM_CLASSES": _WHOLE,
    "MODEL.MLP_DIM": _WHOLE,
    "MODEL.ATTN_HEAD_SIZE": _WHOLE,
    "TRAIN.LINEAR_SCALED_LR": _WHOLE,
    "TRAIN.SMOOTHING": _NUMBER,
    "TRAIN.MODEL_EMA": (bool,),
    "TRAIN.MODEL_EMA_DECAY": _NUMBER,
}
_MAY_BE_NONE = {*_KINDS, "TRAIN.GRAD_CLIP"}
_OF_DEFAULT: Mapping[type, tuple[type, ...]] = {float: _NUMBER, list: _LIST, tuple: _LIST}


def require_kinds(file: Path, given: Mapping[str, Any]) -> None:
    """Refuse values of another kind than PaddleViT's own.

    Raises:
        RecipeError: there is one.
    """
    for key, value in given.items():
        default = DEFAULTS[key]
        kinds = _KINDS.get(key) if default is None else _OF_DEFAULT.get(type(default), (type(default),))
        if kinds is None or (value is None and key in _MAY_BE_NONE):
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise RecipeError(
                f"{file}: {key} is {value!r}",
                rule=f"{' or '.join(kind.__name__ for kind in kinds)}, as in PaddleViT's config.py",
                do="correct the file",
            )


def require_convertible(file: Path, values: Mapping[str, Any]) -> None:
    """Refuse what would be another computation.

    Raises:
        RecipeError: a value that no recipe can have.
    """
    rate, heads, width = values["TRAIN.BASE_LR"], values["MODEL.NUM_HEADS"], values["MODEL.EMBED_DIM"]
    size, decay = values["MODEL.ATTN_HEAD_SIZE"], values["TRAIN.MODEL_EMA_DECAY"]
    rules = {
        "MODEL.TYPE": (str(values["MODEL.TYPE"]).lower() == "vit", "ViT; other models are not known here"),
        "DATA.IMAGE_CHANNELS": (values["DATA.IMAGE_CHANNELS"] == 3, "images have three channels"),
        "MODEL.ATTN_HEAD_SIZE": (size is None or size * heads == width, "MODEL.EMBED_DIM / MODEL.NUM_HEADS, or none"),
        "TRAIN.LR_SCHEDULER.NAME": (
            values["TRAIN.LR_SCHEDULER.NAME"] in ("warmupcosine", "cosine"),
            "warmupcosine or cosine",
        ),
        "TRAIN.OPTIMIZER.NAME": (values["TRAIN.OPTIMIZER.NAME"] in ("AdamW", "SGD"), "AdamW or SGD"),
        "TRAIN.BASE_LR": (rate > 0, "above 0"),
        "TRAIN.END_LR": (0 <= values["TRAIN.END_LR"] <= rate, f"between 0 and TRAIN.BASE_LR, which is {rate}"),
        "TRAIN.MODEL_EMA_DECAY": (not values["TRAIN.MODEL_EMA"] or decay is not None, "given with TRAIN.MODEL_EMA"),
    }
    for key, (holds, rule) in rules.items():
        if not holds:
            raise RecipeError(
                f"{file}: {key} is {values[key]}", rule=rule, do="change it in the file, or write the recipe anew"
            )
