"""The library that counts in evaluations, imported.

It takes seconds, for it imports whatever it finds of other libraries: the fork server of commands that evaluate imports
this module once for all ranks.
"""

from __future__ import annotations

from samestep.runtime.vision import make_torchvision_importable

make_torchvision_importable()

import torchmetrics.classification  # noqa: E402, F401 (not before torchvision can be imported)
