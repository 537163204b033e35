"""`samestep doctor --launch`: which launcher, what was read from where, and what a command would do."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import version
from typing import Any

from samestep.cli import options, ranks
from samestep.errors import EXIT_DONE, EXIT_INPUT, InputError
from samestep.runtime.devices import visible
from samestep.runtime.env import Environment, launch_variables, read_environment, read_rendezvous
from samestep.runtime.processors import read_processors
from samestep.runtime.rendezvous import Rendezvous

_LIBRARIES = ("torch", "numpy", "torchvision", "safetensors")


def show(*, as_json: bool) -> int:
    """Print it; 2 where a command would refuse what it finds."""
    try:
        found, refused = read_rendezvous(), None
    except InputError as error:
        found, refused = None, str(error)
    environment = read_environment()
    facts: dict[str, Any] = {
        "launcher": _launcher(found, refused),
        "variables": launch_variables(),
        "machine": _machine(environment),
        "network": _network(found, environment),
        "versions": {name: version(name) for name in ("samestep", *_LIBRARIES)} | {"python": platform.python_version()},
    }
    facts["train"] = _would_do(found, refused, facts["machine"])
    if as_json:
        options.print_json(facts)
    else:
        print("\n".join(_lines(facts)))
    return EXIT_DONE if refused is None else EXIT_INPUT


def _launcher(found: Rendezvous | None, refused: str | None) -> dict[str, Any]:
    if found is None:
        why = refused or "no launcher's variables are set, or those of one process alone"
        return {"name": None, "why": why, "passed over": []}
    return {
        "name": found.launcher,
        "why": found.why,
        "passed over": list(found.also),
        "rank": found.rank,
        "world size": found.world_size,
        "local rank": found.local_rank,
        "local size": found.local_size,
        "restarts": found.restarts,
        "address": found.address,
        "port": found.port,
        "store": _store(found),
    }


def _store(found: Rendezvous) -> str:
    if found.has_store:
        return "hosted by the launcher"
    if found.port is None:
        return "hosted by rank 0 on a free port of the loopback interface, published in a file of this user"
    return "hosted by rank 0"


def _machine(environment: Environment) -> dict[str, Any]:
    names = ranks.gpu_names()
    return {
        "devices": [
            {"position": position, "is": told, "name": name}
            for position, (told, name) in enumerate(
                zip(visible(environment.visible_devices, len(names)), names, strict=True)
            )
        ],
        "CUDA_VISIBLE_DEVICES": environment.visible_devices,
        "device order": environment.device_order or "PCI_BUS_ID",
        "cores": read_processors().usable,
        "threads a rank": "what the recipe says in step.threads (1 unless it does)",
        "system": platform.platform(),
    }


def _network(found: Rendezvous | None, environment: Environment) -> dict[str, Any]:
    on_one_machine = found is None or found.is_on_one_machine
    own = "loopback" if on_one_machine else "chosen by gloo: the one that the machine's own name leads to"
    return {
        "host": socket.gethostname(),
        "all ranks on this machine": on_one_machine,
        "interface": environment.gloo_interface or own,
        "token": "set" if environment.token is not None else "none",
    }


def _would_do(found: Rendezvous | None, refused: str | None, machine: dict[str, Any]) -> str:
    if refused is not None:
        return "samestep train would refuse to start"
    if found is not None:
        return f"samestep train would be rank {found.rank} of {found.world_size}, and start no processes"
    count = len(machine["devices"]) or machine["cores"]
    each = "GPU" if machine["devices"] else "core"
    return (
        "samestep train would start 1 process; with --processes auto, "
        f"{count} (one a {each}), or as many as the recipe has shards"
    )


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for title, content in facts.items():
        if not isinstance(content, dict):
            lines += [f"{title}", f"  {content}"]
            continue
        lines.append(title)
        for name, value in content.items():
            shown = "; ".join(map(_shown, value)) if isinstance(value, list) else value
            text = "none" if shown in (None, "") else str(shown).replace("\n", "\n  " + " " * 27)
            lines.append(f"  {name:<27}{text}")
        if not content:
            lines.append("  none")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['position']} is {value['is']} ({value['name']})"
    return str(value)
