"""How the numbers of an evaluation are shown to a person."""

from __future__ import annotations


def shown(name: str, value: float) -> str:
    """Losses as they are, the number of samples whole, perplexity with two digits, metrics in percent."""
    if name == "samples":
        return f"{value:,.0f}"
    if name == "perplexity":
        return f"{value:,.2f}"
    return f"{value:.4f}" if name == "loss" or name.startswith("loss_") else f"{value:.2%}"
