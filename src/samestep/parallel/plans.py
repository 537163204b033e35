"""How models that people often train are divided along a tensor axis."""

from __future__ import annotations

from torch import nn

# By the class of a block: each of its products. Where one product makes queries, keys and values, a part of its result
# is not that of some heads, so attention gets the whole.
_PLANS = {
    "samestep.recipes.text.gpt._Block": {
        "mixed": "column_gathered",
        "joined": "row",
        "widened": "column",
        "narrowed": "row",
    },
    "samestep.recipes.text.tokens._Block": {
        "mixed": "column_gathered",
        "joined": "row",
        "layers.0": "column",
        "layers.2": "row",
    },
    "timm.models.vision_transformer.Block": {
        "attn.qkv": "column_gathered",
        "attn.proj": "row",
        "mlp.fc1": "column",
        "mlp.fc2": "row",
    },
    "torchvision.models.vision_transformer.EncoderBlock": {"mlp.0": "column", "mlp.3": "row"},
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": {
        "attn.c_attn": "column_gathered",
        "attn.c_proj": "row",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    },
}
_BERT = {
    "attention.self": "heads",
    **{f"attention.self.{part}": "column" for part in ("query", "key", "value")},
    "attention.output.dense": "row",
    "intermediate.dense": "column",
    "output.dense": "row",
}
_PLANS |= {
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    "transformers.models.roberta.modeling_roberta.RobertaLayer": _BERT,
}


def ready_plan(model: nn.Module) -> dict[str, str]:
    """The words for the modules of a model that has blocks known here; empty if it has none."""
    found: dict[str, str] = {}
    for name, block in model.named_modules():
        for kind in type(block).__mro__:
            plan = _PLANS.get(f"{kind.__module__}.{kind.__qualname__}", {})
            inside = dict(block.named_modules())
            found |= {f"{name}.{part}".lstrip("."): word for part, word in plan.items() if part in inside}
    return found
