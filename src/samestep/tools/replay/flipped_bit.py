"""Search for a flipped bit that explains a difference between two checksums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy
import torch

from samestep.distributed.world import all_gather
from samestep.engine.checksum import MODULUS, Part, signed, state_parts, weights_of, words_of
from samestep.engine.engine import Engine
from samestep.microbatches import Cursor
from samestep.tools.replay.launch import Replayed, ReplayRequest

_SEARCHED = 2**20  # words of a search at once


def flipped_bit(result: Replayed, request: ReplayRequest, engine: Engine, cursor: Cursor) -> str | None:
    """Return the bit whose flip turns the last state into the logged one, as text; None if no single bit does.

    A collective.
    """
    logged, own = request.logged.get(request.last), result.checksums.get(request.last)
    difference = (int(logged, 16) - int(own, 16)) % MODULUS if logged is not None and own is not None else 0
    differences = all_gather(str(difference), engine.world)
    location = _find(state_parts(engine, cursor).tensors, int(differences[0]))
    texts: list[str | None] = all_gather(location, engine.world)
    return next((text for text in texts if text is not None), None)


def _find(parts: Mapping[str, Part], difference: int) -> str | None:
    """Return the bit of a tensor whose flip changes a checksum by `difference` modulo 2^64, as text, if there is one.

    A flip of bit b of word i changes the checksum by plus or minus 2^b w_i, and w_i is odd. One of n words fits another
    difference by chance with a probability of about n / 2^58.
    """
    if difference == 0:
        return None
    bit = (difference & -difference).bit_length() - 1
    for name, part in parts.items():
        sample = words_of(torch.empty(1, dtype=part.tensor.dtype))
        per_element, width = len(sample), 8 * sample.element_size()
        words = part.shape.numel() * per_element
        for begin in range(0, words if bit < width else 0, _SEARCHED):
            changes = weights_of(name, part, begin, min(begin + _SEARCHED, words)) << bit
            hits = ((changes == signed(difference)) | (changes == signed(-difference))).nonzero()
            if len(hits):
                element, word = divmod(begin + int(hits[0]), per_element)
                indices = [int(index) for index in numpy.unravel_index(element, part.shape)]
                return f"bit {width * word + bit} of element {indices} of {name}"
    return None
