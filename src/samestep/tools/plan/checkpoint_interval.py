"""Interval between checkpoints for a rate of failures, and the share of the time that is useful with it.

Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (2006).
"""

from __future__ import annotations

import math


def young_interval(checkpoint: float, mtbf: float) -> float:
    """Return Young's interval in seconds between checkpoints.

    Args:
        checkpoint: seconds for which a checkpoint stops training.
        mtbf: mean time between failures of the whole job, in seconds.
    """
    return math.sqrt(2 * checkpoint * mtbf)


def daly_interval(checkpoint: float, mtbf: float) -> float:
    """Return Daly's interval in seconds between checkpoints, equation 37; arguments as of `young_interval`."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return young_interval(checkpoint, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def useful_share(interval: float, checkpoint: float, restart: float, mtbf: float) -> float:
    """Return the share of the time that is useful, for failures at random times (Daly, equation 20).

    Args:
        interval: seconds of training between checkpoints.
        checkpoint: seconds of a checkpoint.
        restart: seconds from a failure to the next step.
        mtbf: mean time between failures of the whole job, in seconds.
    """
    exponent = (interval + checkpoint) / mtbf
    if exponent > 700 or restart / mtbf > 700:  # no progress: the exponential is no float
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))
