"""Trust in the code that a run directory names.

Components of Samestep and of well-known libraries are imported from any run. Other import paths are
code of the author of the run: they need `--trust`, or a signature of this account, whose key is
outside of the run directory.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
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

_SECTIONS = ("data", "model", "loss", "optimizer")
_SIGNATURE_FILE = "signature"
_KEY_FILE = "signature-key"
_KEY_BYTES = 32
# Libraries of models by name (`timm:vit_base_patch16_224`), which never load code or weights from
# the network.
_MODEL_LIBRARIES = ("timm", "torchvision", "transformers")
# Modules of which classes, and modules of which functions, can be components of any recipe. None of
# them runs code that its options name, as `torch:load` and `torch.hub:load` do.
_CLASSES = {
    "model": ("monai.networks.nets", "segmentation_models_pytorch", "torch.nn"),
    "loss": ("monai.losses", "segmentation_models_pytorch.losses", "timm.loss", "torch.nn"),
    "optimizer": ("timm.optim", "torch.optim"),
}
_FUNCTIONS = {"loss": ("torch.nn.functional", "torchvision.ops")}
# Classes that load weights of the network by default.
_DOWNLOADING = ("EfficientNetBN", "EfficientNetBNFeatures", "MILModel", "Transchex")
# Options of models and their configurations by which libraries open files or addresses, or load
# other models. Text with a separator of paths, addresses or import paths is such a value anywhere:
# the attention of transformers can be a repository of code, an encoder `tu-hf-hub:OWNER/NAME`.
_OPENING = re.compile("(?i)cache|checkpoint|dir|file|hub|path|pretrained|remote|url|weights")
_SWITCH = re.compile("(?i)download|pretrained|remote")
_PLAIN = re.compile(r"[\w+-]*")
_ZOO = re.compile(r"samestep\.zoo((\.[a-z]\w*)+:(load_\w+|[A-Z]\w*)|\.losses:cross_entropy)")
_CLASS = re.compile(r"[A-Z]\w*")
_FUNCTION = re.compile(r"[a-z]\w*")


def foreign_paths(recipe: Recipe) -> dict[str, str]:
    """Return the names in a recipe that may be code of its author, by section.

    A well-known component is named with its first option that opens files or addresses, or loads
    code. Options of data name their files, which run no code.
    """
    components = {}
    for section in _SECTIONS:
        component = getattr(recipe, section)
        name = str(component.name)
        opening = "" if section == "data" else _opening_option(component.options)
        if not _is_well_known(section, name):
            components[section] = name
        elif opening:
            components[section] = f"{name} with {opening}"
    return components


def _opening_option(options: Mapping[str, Any]) -> str:
    """Return the first of nested options that opens something, with its value; empty for none."""
    for key, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and one and (_OPENING.search(key) or not _PLAIN.fullmatch(one)):
                return f"{key}={one!r}"
            if one is True and _SWITCH.search(key):
                return f"{key}=true"
            if isinstance(one, Mapping) and (inner := _opening_option(one)):
                return f"{key}.{inner}"
    return ""


def _is_well_known(section: str, name: str) -> bool:
    module, colon, attribute = name.partition(":")
    if not colon or _ZOO.fullmatch(name):
        return True  # a short name can only be one of Samestep's
    package = module.partition(".")[0]
    is_class = module in _CLASSES.get(section, ()) and _CLASS.fullmatch(attribute)
    if attribute in _DOWNLOADING:
        return False
    is_function = module in _FUNCTIONS.get(section, ()) and _FUNCTION.fullmatch(attribute)
    is_model = section == "model" and module in _MODEL_LIBRARIES and ":" not in attribute
    if not (is_class or is_function or is_model):
        return False
    # A folder of this name in the current folder is not the package.
    folders = [path for path in sys.path if path and Path(path) != Path.cwd()]
    return PathFinder.find_spec(package, folders) is not None


def sign(folder: Path, recipe: Recipe) -> None:
    """Sign a run with a trusted recipe; without a key of this account, it needs `--trust` later."""
    if not foreign_paths(recipe):
        return
    try:
        signature = _signature(recipe, _key(create=True))
        with replacing(folder / _SIGNATURE_FILE) as temporary:
            temporary.write_text(signature + "\n", encoding="ascii")
    except (OSError, InputError) as error:
        reason = getattr(error, "value", error)
        logger.warning("resume, eval, predict and export of %s need --trust: %s", folder, reason)


def require_trusted(folder: Path, recipe: Recipe, *, trust: bool | Recipe) -> None:
    """Require trust in the code that a run directory names, and sign a run with `trust`.

    Args:
        folder: directory of the run.
        recipe: recipe in the directory.
        trust: trust the code; a recipe of the command line trusts its code too.

    Raises:
        InputError: the recipe names other code, and this account has not signed the run.
    """
    paths = foreign_paths(recipe)
    if isinstance(trust, Recipe):
        trust = paths.items() <= foreign_paths(trust).items()
    if trust:
        sign(folder, recipe)
    elif paths and (reason := _unsigned(folder, recipe)):
        names = ", ".join(f"{section} {name}" for section, name in paths.items())
        error = InputError(
            f"{folder} names code outside of Samestep: {names}",
            expected="a run that this account has trained on this machine, or components of "
            "Samestep, torch, torchvision, timm, transformers, monai and "
            "segmentation_models_pytorch (docs/security.md)",
            fix="--trust, if you trust the author of the run and these modules: their code runs "
            "with your permissions",
            code="E_UNTRUSTED",
        )
        error.add_note(f"there is no signature: {reason}")
        raise error


def _unsigned(folder: Path, recipe: Recipe) -> str:
    """Return why a run has no signature of this account; empty if it has one."""
    try:
        content = read_small(folder / _SIGNATURE_FILE, 100)
        own = _signature(recipe, _key(create=False)).encode()
    except (OSError, InputError) as error:
        return str(getattr(error, "value", error))
    if hmac.compare_digest(content.strip(), own):
        return ""
    return "it is that of another account, or of other components"


def _signature(recipe: Recipe, key: bytes) -> str:
    """Return the HMAC-SHA256 of the names and options of the foreign components."""
    data: dict[str, Any] = recipe_data(recipe)
    content = {
        section: [data[section]["name"], data[section]["options"]]
        for section in foreign_paths(recipe)
    }
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes:
    """Return the secret key of this account.

    Raises:
        OSError: there is none, or others can read or replace it.
        InputError: the account has no home folder.
    """
    path = state_folder() / _KEY_FILE
    if create and not path.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.parent.mkdir()
            path.parent.chmod(0o700)  # whatever the umask
        _require_private(path.parent)
        temporary = path.with_name(f"{_KEY_FILE}-{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                file.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another process has created the key
                os.link(temporary, path)
        finally:
            temporary.unlink()
    _require_private(path.parent)
    _require_private(path)
    key = read_small(path, _KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged")
    return key


def _require_private(path: Path) -> None:
    """Require that no other account can use or replace a file or a folder."""
    status = path.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "others can use it, or it belongs to others", str(path))
