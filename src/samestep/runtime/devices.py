"""A choice among the GPUs that this process may use.

`CUDA_VISIBLE_DEVICES` is how CUDA is told which devices there are: numbers, or names of devices or of parts of them
(`GPU-...`, `MIG-...`), with commas between (CUDA C++ Programming Guide, "CUDA Environment Variables").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from samestep.errors import InputError

_NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class Devices:
    """The devices that ranks are given, one each, in this order.

    Attributes:
        positions: which of those that this process sees, from 0.
        names: what `CUDA_VISIBLE_DEVICES` calls them: a number of the machine, or a name.
    """

    positions: tuple[int, ...]
    names: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """What ranks find in their environment, so that the first of them has device 0, as with other launchers."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.names)}


def visible(setting: str | None, count: int) -> tuple[str, ...]:
    """The names of the devices that a process sees, in its order.

    Args:
        setting: `CUDA_VISIBLE_DEVICES`, None where it is not set.
        count: how many devices torch counts under this setting.
    """
    if setting is None:
        return tuple(map(str, range(count)))
    # CUDA takes none after the first that it does not know, such as -1; torch's count stops there too.
    return tuple(entry.strip() for entry in setting.split(","))[:count]


def chosen(text: str, setting: str | None, count: int) -> Devices:
    """What `--devices` says.

    Args:
        text: positions among the devices that this process sees, such as `0,2`.
        setting: `CUDA_VISIBLE_DEVICES`, None where it is not set.
        count: how many devices torch counts.

    Raises:
        InputError: it is no such list, or a device is not there or is there twice.
    """
    parts = text.split(",")
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise InputError(
            f"--devices {text}",
            rule="positions among the devices that this process sees, from 0, with commas between",
            do="--devices 0,2; names of devices go into CUDA_VISIBLE_DEVICES",
        )
    positions = [int(part) for part in parts]
    if count == 0:
        raise InputError(
            f"--devices {text}, but torch sees no GPU on this machine",
            rule="a rank gets a GPU of its own",
            do="leave --devices out, and give --processes; nvidia-smi shows what the machine has",
        )
    missing = [str(position) for position in positions if position >= count]
    if missing:
        raise InputError(
            f"--devices {text}, but there is no device {', '.join(missing)}: torch sees {count}",
            rule=f"0 to {count - 1}" + (f", counted within CUDA_VISIBLE_DEVICES={setting}" if setting else ""),
            do="samestep doctor shows them",
        )
    if len(set(positions)) < len(positions):
        raise InputError(
            f"--devices {text} names a device twice", rule="a rank gets a GPU of its own", do="name each device once"
        )
    names = visible(setting, count)
    return Devices(tuple(positions), tuple(names[position] for position in positions))
