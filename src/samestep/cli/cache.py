"""`samestep cache`: list and removal of the caches of samples."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.cli.options import add_options, print_json
from samestep.distributed.env import CACHE, cache_folder
from samestep.errors import EXIT_DONE, InputError
from samestep.units import format_bytes, format_count
from samestep.zoo.cache.sample_cache import CacheInfo, list_caches, remove_cache

_ALL = "all"


def add_cache(add_parser: Any) -> None:
    """Add `samestep cache`."""
    parser = add_parser(
        description="List the caches that runs with data.cache, or with files of an object store, have written, or "
        f"remove them. They are in ~/.cache/samestep, or in the folder of the environment variable {CACHE}.",
        epilog="example: samestep cache --clear photos-1f3a9c02de",
    )
    text = "remove one cache, or all of them without NAME"
    parser.add_argument("--clear", nargs="?", const=_ALL, metavar="NAME", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_cache)


def _cache(arguments: argparse.Namespace) -> int:
    """Remove the selected caches, and print those or all."""
    caches, clears = list_caches(), arguments.clear is not None
    if clears:
        caches = _selected(caches, arguments.clear)
        for cache in caches:
            remove_cache(cache.name)
    total = sum(cache.bytes for cache in caches)
    if arguments.json:
        key = "removed" if clears else "caches"
        print_json({"folder": str(cache_folder()), key: [asdict(cache) for cache in caches], "bytes": total})
        return EXIT_DONE
    table = Table(box=None, pad_edge=False)
    for title in ("name", "kind", "entries", "size", "source"):
        table.add_column(title, justify="right" if title in ("entries", "size") else "left", overflow="fold")
    for cache in caches:
        table.add_row(cache.name, cache.kind, format_count(cache.entries), format_bytes(cache.bytes), cache.source)
    if caches:
        Console().print(table)
    print(f"{'removed' if clears else 'in all':<12}{format_bytes(total)} in {cache_folder()}")
    return EXIT_DONE


def _selected(caches: list[CacheInfo], name: str) -> list[CacheInfo]:
    selected = [cache for cache in caches if name in (_ALL, cache.name)]
    if not selected and name != _ALL:
        raise InputError(
            f"there is no cache {name!r} in {cache_folder()}",
            expected=f"one of {', '.join(cache.name for cache in caches) or '(none)'}",
            fix="samestep cache lists the caches",
            code="E_UNKNOWN_NAME",
        )
    return selected
