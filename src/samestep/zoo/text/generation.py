"""Text generation with a language model. Equal arguments and weights give equal tokens."""

from __future__ import annotations

import torch

from samestep.errors import InputError
from samestep.zoo.splits import Answer
from samestep.zoo.text.tokenizer import Tokenizer


def complete(model: torch.nn.Module, prompt: str, count: int, *, tokenizer: Tokenizer, block_size: int) -> str:
    """Return at most `count` tokens after `prompt` as text, without the prompt."""
    start = tokenizer.encode(prompt.encode())
    if not start:
        start = [0 if tokenizer.end is None else tokenizer.end]  # the end token precedes every document
    return tokenizer.decode(generate(model, start, count, block_size=block_size, end=tokenizer.end))


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokens: list[int],
    count: int,
    *,
    block_size: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """Return at most `count` tokens that follow `tokens`.

    Args:
        model: function from tokens `(N, T)` to logits `(N, vocabulary, T)`.
        tokens: the beginning.
        count: maximum number of tokens.
        block_size: maximum number of tokens of the model's input.
        temperature: divisor of the logits; 0 takes the most probable token without sampling.
        top_k: number of most probable tokens to sample from; None for all tokens.
        seed: seed of the random draws.
        end: token that ends the generation.

    Raises:
        InputError: a number is out of range.
    """
    if count < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise InputError(
            f"count is {count}, temperature is {temperature}, top_k is {top_k}",
            expected="count >= 0, temperature >= 0, top_k >= 1",
            fix="use temperature 0 for the most probable token, top_k None for all tokens",
            code="E_VALUE",
        )
    generator = torch.Generator().manual_seed(seed)  # of the CPU: the same numbers for every device of the model
    device = next(model.parameters()).device
    model.eval()
    result: list[int] = []
    while len(result) < count:
        window = [*tokens, *result][-block_size:]
        logits = model(torch.tensor([window], device=device))[0, :, -1].double().cpu()
        token = _sample(logits, temperature, top_k, generator)
        if token == end:
            break
        result.append(token)
    return result


def next_tokens(tokenizer: Tokenizer, outputs: torch.Tensor) -> Answer:
    """Return the five most probable tokens after the last position of outputs `(1, C, T)` or `(C, T)`."""
    probabilities = outputs.reshape(outputs.shape[-2:])[:, -1].double().softmax(dim=0)
    values, tokens = probabilities.topk(min(5, len(probabilities)))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return {"next": [{"token": tokenizer.name(token), "probability": value} for token, value in pairs]}


def _sample(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    values, tokens = logits.sort(descending=True, stable=True)
    values, tokens = values[:top_k], tokens[:top_k]
    choice = torch.multinomial((values / temperature).softmax(dim=0), 1, generator=generator)
    return int(tokens[choice])
