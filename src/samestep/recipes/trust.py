"""Trust in the code that a run directory names.

Components of Samestep, torch and libraries of models are imported from any run. Other import paths
are code of the author of the run: they need `--trust`, once for an account.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from samestep.checkpoint.durable_files import replacing
from samestep.config import Recipe
from samestep.distributed.disk_operations import read_small
from samestep.distributed.env import state_folder
from samestep.distributed.logging import logger
from samestep.errors import InputError
from samestep.recipes.recipe_files import recipe_data

_TOKEN_FILE = "trust"
_SECTIONS = ("data", "model", "loss", "optimizer")
# Import paths that can be in any recipe, beside short names. None of them runs code that its
# options name, as `torch:load` and `torch.hub:load` do.
_WELL_KNOWN = {
    "model": re.compile(r"(torch\.nn|transformers):[A-Z]\w*|(timm|torchvision):\w+(\.\w+)?"),
    "loss": re.compile(r"torch\.nn:[A-Z]\w*|torch\.nn\.functional:[a-z]\w*"),
    "optimizer": re.compile(r"torch\.optim:[A-Z]\w*"),
}


def foreign_paths(recipe: Recipe) -> dict[str, str]:
    """Return the names in a recipe that may be code of its author, by section.

    A well-known model is named with the options that can open a file or an address. Options of data
    name their files, which run no code.
    """
    components = {}
    for section in _SECTIONS:
        component = getattr(recipe, section)
        name = str(component.name)
        opening: list[str] = []
        if section == "model":
            opening = list(_opening_options(component.options))
        if not _is_well_known(section, name):
            components[section] = name
        elif opening:
            components[section] = f"{name} with {', '.join(opening)}"
    return components


def _is_well_known(section: str, name: str) -> bool:
    if ":" not in name:
        return True  # a short name can only be one of Samestep's
    if section not in _WELL_KNOWN or not _WELL_KNOWN[section].fullmatch(name):
        return False
    # A folder of this name in the current folder is not the package.
    folders = [path for path in sys.path if path and Path(path) != Path.cwd()]
    package = re.split(r"\W", name)[0]
    # Found, not imported: an import would run the code.
    return PathFinder.find_spec(package, folders) is not None


def _opening_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield nested options that are text or true, with their values.

    Text can be a path, an address or the name of an encoder on the Hugging Face Hub; `true` can
    select pretrained weights.
    """
    for key, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is True or (isinstance(one, str) and one):
                yield f"{key}={json.dumps(one)}"
            if isinstance(one, Mapping):
                yield from (f"{key}.{inner}" for inner in _opening_options(one))


def remember(folder: Path, recipe: Recipe) -> None:
    """Record that this account trusts the code of a run; if this fails, it needs `--trust`."""
    if not foreign_paths(recipe):
        return
    try:
        token = secrets.token_hex()
        mark = _mark(token, recipe)
        state = mark.parent
        state.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            state.mkdir()
            state.chmod(0o700)  # whatever the umask
        _require_private(state)
        mark.touch()
        with replacing(folder / _TOKEN_FILE) as temporary:
            temporary.write_text(token, encoding="ascii")
    except (OSError, InputError) as error:
        reason = getattr(error, "value", error)
        logger.warning("resume, eval, predict and export of %s need --trust: %s", folder, reason)


def require_trusted(folder: Path, recipe: Recipe, *, trust: bool | Recipe) -> None:
    """Require trust in the code that a run directory names, and remember it with `trust`.

    Args:
        folder: directory of the run.
        recipe: recipe in the directory.
        trust: trust the code; a recipe of the command line trusts its code too.

    Raises:
        InputError: the recipe names other code, and this account has not trusted the run before.
    """
    paths = foreign_paths(recipe)
    if isinstance(trust, Recipe):
        trust = paths.items() <= foreign_paths(trust).items()
    if not paths or _is_remembered(folder, recipe):
        return
    if trust:
        remember(folder, recipe)
    else:
        names = ", ".join(f"{section} {name}" for section, name in paths.items())
        raise InputError(
            f"{folder} names code outside of Samestep: {names}",
            expected="a run that this account has trained on this machine, or components of "
            "Samestep, torch, torchvision, timm and transformers (docs/security.md)",
            fix="--trust, if you trust the author of the run and these modules: their code runs "
            "with your permissions",
            code="E_UNTRUSTED",
        )


def _is_remembered(folder: Path, recipe: Recipe) -> bool:
    try:
        token = read_small(folder / _TOKEN_FILE, 100).decode(errors="replace")
        mark = _mark(token, recipe)
        _require_private(mark.parent)
    except (OSError, InputError):
        return False
    return mark.exists()


def _mark(token: str, recipe: Recipe) -> Path:
    """Return the file that exists if this account trusts the foreign components of a run.

    Not a file in the run directory, which is that of its author. The author of another run cannot
    know the token of this one, and so cannot claim its trust for modules of the same names.

    Raises:
        InputError: the account has no home folder.
    """
    data: dict[str, Any] = recipe_data(recipe)
    components = {
        section: [data[section]["name"], data[section]["options"]]
        for section in foreign_paths(recipe)
    }
    content = [token, components]
    # Sorted: the order of keys in a recipe has no meaning.
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return state_folder() / f"trusted-{digest}"


def _require_private(path: Path) -> None:
    """Require that no other account can write to a folder, or has put one there."""
    # Of a link itself, which another account could have put there.
    status = path.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "others can use it, or it belongs to others", str(path))
