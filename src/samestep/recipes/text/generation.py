"""Going on with a text: one token after the other, the same ones whenever they are asked for."""

from __future__ import annotations

import torch

from samestep.errors import InputError
from samestep.recipes.task import Answer
from samestep.recipes.text.tokenizer import Tokenizer

_TOLD = 5


def complete(
    model: torch.nn.Module,
    prompt: str,
    count: int,
    *,
    tokenizer: Tokenizer,
    context: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> str:
    """What comes after `prompt`: at most `count` tokens, fewer where the text ends; without the prompt itself."""
    start = tokenizer.encode(prompt.encode())
    if not start:
        start = [0 if tokenizer.end is None else tokenizer.end]  # what stands before the beginning of a text
    found = generate(
        model, start, count, context=context, temperature=temperature, top_k=top_k, seed=seed, end=tokenizer.end
    )
    return tokenizer.decode(found)


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokens: list[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """At most `count` tokens that follow `tokens`; a function of these arguments and the weights.

    Args:
        context: the most tokens that the model looks at.
        temperature: below 1 likely tokens become likelier; at 0 the likeliest is taken, and nothing is drawn.
        top_k: only so many of the likeliest are drawn from; None for all.
        end: leaves off where this token comes.

    Raises:
        InputError: a number is out of range.
    """
    if count < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise InputError(
            f"{count} tokens at temperature {temperature} of the {top_k} likeliest",
            rule="tokens >= 0, temperature >= 0, top_k >= 1",
            do="temperature 0 for the likeliest token, top_k None for all",
        )
    # Drawn on the CPU, where a seed means the same numbers whatever computes the model.
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    model.eval()
    found: list[int] = []
    while len(found) < count:
        row = [*tokens, *found][-context:]
        logits = model(torch.tensor([row], device=device))[0, :, -1].double().cpu()
        token = _drawn(logits, temperature, top_k, generator)
        if token == end:
            break
        found.append(token)
    return found


def next_tokens(tokenizer: Tokenizer, outputs: torch.Tensor) -> Answer:
    """The likeliest tokens after the last place of `(1, C, T)` or `(C, T)`, with their probabilities."""
    probabilities = outputs.reshape(outputs.shape[-2:])[:, -1].double().softmax(dim=0)
    values, tokens = probabilities.topk(min(_TOLD, len(probabilities)))
    named = zip(tokens.tolist(), values.tolist(), strict=True)
    return {"next": [{"token": tokenizer.name(token), "probability": value} for token, value in named]}


def _drawn(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    values, tokens = logits.sort(descending=True, stable=True)
    values, tokens = values[:top_k], tokens[:top_k]
    place = torch.multinomial((values / temperature).softmax(dim=0), 1, generator=generator)
    return int(tokens[place])
