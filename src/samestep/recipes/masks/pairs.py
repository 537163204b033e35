"""Files in two folders that belong together because they have the same name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from samestep.errors import DataError
from samestep.recipes.kept_apart import kept_apart

Unpaired = Literal["stop", "skip"]
_NAMED = 10  # files without a partner, in an error or a note


class Pair(NamedTuple):
    """An image or a volume and its mask.

    Attributes:
        name: path below its folder without the ending, with `/` between folders.
    """

    name: str
    image: Path
    mask: Path


class Folders(NamedTuple):
    """Where images and masks are."""

    images: Path
    masks: Path


def folders_of(path: str | None, images: str | None, masks: str | None, *, where: str = "data.options") -> Folders:
    """The two folders that options name: `path`, which holds both, or each of them.

    Raises:
        DataError: options contradict each other, or a folder is not there.
    """
    if (path is None) != (images is not None and masks is not None) or (images is None) != (masks is None):
        raise DataError(
            f"{where}.path is {path}, images is {images}, masks is {masks}",
            rule="path, a folder with the folders images and masks; or both of images and masks",
            do=f"--set {where}.path=FOLDER",
        )
    found = Folders(Path(images or f"{path}/images"), Path(masks or f"{path}/masks"))
    for folder in found:
        if not folder.is_dir():
            raise DataError(
                f"there is no folder {folder}",
                rule=f"{where}.path has the folders images and masks",
                do=f"look at the path, or give {where}.images and {where}.masks",
            )
    return found


def find_pairs(
    folders: Folders, endings: Sequence[str], *, mask_suffix: str = "", unpaired: str = "stop"
) -> tuple[list[Pair], list[str]]:
    """Pairs of files with the same name below the two folders, sorted by name, and what should be told.

    Args:
        endings: of files that are looked at; longer ones first where one ends in another.
        mask_suffix: what the name of a mask has besides: `_mask` for `cat.jpg` and `cat_mask.png`.
        unpaired: files without a partner: `stop`, they are refused; `skip`, they are left out and named.

    Raises:
        DataError: there are no pairs, two files have one name, or some have no partner and `unpaired` is `stop`.
    """
    if unpaired not in ("stop", "skip"):
        raise DataError(f"data.options.unpaired is {unpaired!r}", rule="stop or skip", do="data.options.unpaired=skip")
    images = _by_name(folders.images, endings, "")
    masks = _by_name(folders.masks, endings, mask_suffix)
    alone = [f"{images[name]} has no mask" for name in sorted(images.keys() - masks.keys())]
    alone += [f"{masks[name]} has no image" for name in sorted(masks.keys() - images.keys())]
    pairs = [Pair(name, images[name], masks[name]) for name in sorted(images.keys() & masks.keys())]
    if not pairs:
        raise DataError(
            f"no file in {folders.images} has a partner in {folders.masks} ({len(images)} images, {len(masks)} masks)",
            rule=f"an image and its mask have the same name, and end in {', '.join(endings)}",
            do="look at the names; data.options.mask_suffix=_mask for cat.jpg and cat_mask.png",
        )
    if alone and unpaired == "stop":
        raise DataError(
            f"{_counted(alone)} without a partner: {_listed(alone)}",
            rule="every image has a mask of the same name, every mask an image",
            do="add or remove them, or leave them out: data.options.unpaired=skip",
        )
    return pairs, [f"left out {_counted(alone)} without a partner: {_listed(alone)}"] if alone else []


def train_and_evaluation(
    find: Callable[[Folders], tuple[list[Pair], list[str]]],
    folders: Folders,
    evaluation_path: str | None,
    fraction: float,
) -> tuple[list[Pair], list[Pair], list[str]]:
    """Pairs to train on and to evaluate on, and notes on what is left out.

    Args:
        find: pairs and notes of two folders.
        evaluation_path: a folder with the folders `images` and `masks`; None for a part of `folders`.

    Raises:
        DataError: as `find_pairs`, `folders_of` and `split_pairs`.
    """
    pairs, notes = find(folders)
    if evaluation_path is None:
        return *split_pairs(pairs, fraction), notes
    evaluation, more = find(folders_of(evaluation_path, None, None))
    return pairs, evaluation, notes + more


def split_pairs(pairs: Sequence[Pair], fraction: float) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and to evaluate on, at least one each, by a hash of names.

    Raises:
        DataError: there is one pair, or the fraction cannot be.
    """
    if len(pairs) < 2:
        raise DataError(
            f"there is one pair, {pairs[0].name}",
            rule="one to train on and one to evaluate on",
            do="add pairs, or give data.options.evaluation_path",
        )
    names = [pair.name for pair in pairs]
    train, evaluation = kept_apart(names, [0] * len(names), ("",), fraction)
    return [pairs[place] for place in train], [pairs[place] for place in evaluation]


def _by_name(root: Path, endings: Sequence[str], suffix: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*")):
        ending = next((ending for ending in endings if path.name.lower().endswith(ending)), None)
        if ending is None or path.name.startswith(".") or not path.is_file():
            continue
        name = path.relative_to(root).as_posix()[: -len(ending)]
        name = name.removesuffix(suffix)
        if name in found:
            raise DataError(
                f"{found[name]} and {path} have the same name",
                rule="one file a name; the ending does not count",
                do="remove or rename one of them",
            )
        found[name] = path
    return found


def _counted(files: Sequence[str]) -> str:
    return f"{len(files)} file{'s' if len(files) > 1 else ''}"


def _listed(files: Sequence[str]) -> str:
    more = f"; and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return "; ".join(files[:_NAMED]) + more
