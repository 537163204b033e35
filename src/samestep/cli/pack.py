"""`samestep pack`: sharded files from samples, and indices of existing files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep.cli.options import add_options, option_conflict, print_json, progress
from samestep.errors import EXIT_DONE, InputError
from samestep.units import format_bytes, parse_bytes


def add_pack(add_parser: Any) -> None:
    """Add `samestep pack`."""
    parser = add_parser(
        description="Write samples to MDS files, which support reads at any position, with checksums in their index. "
        "An interrupted command continues when it is repeated, and writes the same bytes. With --index: write an index "
        "next to existing files.",
        epilog="example: samestep pack my_project.data:documents packed --file-size 64MiB",
    )
    text = "module:function that returns an iterable of samples, a file .jsonl or .txt, or a folder with --from"
    parser.add_argument("source", metavar="SRC", help=text)
    parser.add_argument("folder", nargs="?", type=Path, metavar="DEST", help="new folder; none with --index")
    kinds = ("mds", "litdata", "parquet", "arrow", "webdataset", "tokens")
    parser.add_argument("--from", dest="kind", choices=kinds, help="format of the files in the folder SRC")
    parser.add_argument("--index", action="store_true", help="write the index of the files of the format --from in SRC")
    text = "argument of the function, or option of the format: length=1024"
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "encoding of a column, such as meta=json (default: from the first sample)"
    parser.add_argument("--column", action="append", default=[], metavar="NAME=ENCODING", help=text)
    parser.add_argument("--file-size", default="64MiB", metavar="SIZE", help="maximum size of a file (default 64MiB)")
    add_options(parser, "--json")
    parser.set_defaults(run=_pack)


def _pack(arguments: argparse.Namespace) -> int:
    """Write the files or the index, and print the numbers."""
    from samestep.tools.pack.pack import pack
    from samestep.tools.pack.samples import samples_of
    from samestep.tools.pack.write_index import write_index

    report = progress(arguments)
    if arguments.index:
        if arguments.folder is not None or arguments.kind is None:
            raise option_conflict("--index", "SRC and --from, without DEST", "samestep pack SRC --index --from FORMAT")
        result = asdict(write_index(Path(arguments.source), arguments.kind, report))
        place = Path(arguments.source)
    else:
        if arguments.folder is None:
            raise option_conflict("SRC without DEST", "a new folder", f"samestep pack {arguments.source} DEST")
        options = {name: _value(text) for name, text in _pairs("--option", arguments.option).items()}
        encodings, place = _pairs("--column", arguments.column), arguments.folder
        samples = samples_of(arguments.source, arguments.kind, options)
        source = json.dumps([arguments.source, arguments.kind, options])
        size = parse_bytes("--file-size", arguments.file_size)
        packed = pack(samples, place, source=source, encodings=encodings, file_bytes=size, report=report)
        result = asdict(packed)
    if arguments.json:
        print_json({"folder": str(place), **result})
    else:
        numbers = f"{result['samples']:,} samples, {result['files']:,} files, {format_bytes(result['bytes'])}"
        print(f"{'indexed' if arguments.index else 'packed':<12}{place}: {numbers}")
    return EXIT_DONE


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise InputError(f"{option} {text}", "a name and a value", f"{option} NAME=VALUE", code="E_VALUE")
    return dict(text.split("=", 1) for text in texts)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # text without quotes
        return text
