"""Default tolerance of a certificate under `fast` reduction."""

from __future__ import annotations

from samestep.errors import InputError

# Rounding of sums in another order, after a few steps; in float64, the promise of the project for gradients.
_TOLERANCES = {True: 1e-12, False: 1e-4}
# Gradients of 11 and of 8 bits differ by 7e-4 and 6e-3 in a first step; later, a ReLU can be on in one run and off in
# the other.
_HOOK_TOLERANCES = {"fp16": 0.1, "bf16": 0.5}


def default_tolerance(hook: str, *, double: bool) -> float:
    """Return the largest relative distance of equal results.

    Args:
        hook: compression of gradients, as in `strategy.hook` of recipes.
        double: the trials compute in float64.

    Raises:
        InputError: the error of the hook depends on the model.
    """
    if hook == "powersgd":
        raise InputError(
            "strategy.hook powersgd without --tolerance",
            expected="a tolerance: the error of this approximation depends on the model",
            fix="--tolerance 2, or --set strategy.hook=none",
            code="E_OPTION_CONFLICT",
        )
    return _HOOK_TOLERANCES[hook] if hook in _HOOK_TOLERANCES else _TOLERANCES[double]
