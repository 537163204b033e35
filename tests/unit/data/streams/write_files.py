"""Write the files of `files/` with mosaicml-streaming 0.13.0, litdata 0.2.76 and webdataset 1.0.2.

The tests do not run this script: they read the files that it has written.
"""

from pathlib import Path

import litdata
import numpy
import streaming
import torch
import webdataset
from PIL import Image

FILES = Path(__file__).with_name("files")
COUNT = 10
MDS_COLUMNS = {
    "number": "int",
    "text": "str",
    "data": "bytes",
    "third": "float64",
    "small": "uint8",
    "json": "json",
    "array": "ndarray",
    "matrix": "ndarray:float32:2,3",
    "raw": "pil",
    "image": "png",
    "large": "str_int",
}


def image(i: int) -> Image.Image:
    return Image.fromarray(numpy.full((2, 3, 3), i, numpy.uint8))


def mds_sample(i: int) -> dict[str, object]:
    sample = {"number": i, "text": f"text ä {i}", "data": bytes([i] * i), "third": i / 3, "small": i}
    sample |= {
        "large": 10**30 + i,
        "json": {"k": [i, None]},
        "array": numpy.arange(i + 1, dtype=numpy.int16).reshape(1, -1),
    }
    return sample | {"matrix": numpy.full((2, 3), i, numpy.float32), "raw": image(i), "image": image(i)}


def plain_sample(i: int) -> dict[str, object]:
    return {"number": i, "text": f"text ä {i}", "third": i / 3, "array": numpy.arange(i + 1, dtype=numpy.int64)}


def litdata_sample(i: int) -> dict[str, object]:
    sample = {"number": i, "text": f"text ä {i}", "third": i / 3, "flag": i % 2 == 0, "data": bytes([i] * i)}
    sample |= {"pair": (torch.full((2, 2), i), torch.arange(i + 1, dtype=torch.float32))}
    return sample | {"array": numpy.full((2, 3), i, numpy.float32), "flat": [numpy.arange(i + 1, dtype=numpy.uint16)]}


def litdata_tokens(i: int) -> torch.Tensor:
    return torch.arange(10 * i, 10 * i + 10, dtype=torch.int32)


def main() -> None:
    for name, compression in (("mds", None), ("mds_zstd", "zstd:3")):
        options = {"size_limit": 1200, "hashes": ["sha256", "xxh64"], "compression": compression}
        with streaming.MDSWriter(out=str(FILES / name), columns=MDS_COLUMNS, **options) as writer:
            for i in range(COUNT):
                writer.write(mds_sample(i))
    columns = {"number": "int", "text": "str", "third": "float64", "array": "ndarray"}
    out = str(FILES / "mds_plain")
    with streaming.MDSWriter(out=out, columns=columns, size_limit=700, hashes=["sha256"]) as writer:
        for i in range(COUNT):
            writer.write(plain_sample(i))
    one = {"num_workers": 1, "start_method": "fork"}
    litdata.optimize(litdata_sample, list(range(COUNT)), str(FILES / "litdata"), chunk_size=4, **one)
    loader = litdata.TokensLoader(4)
    numbers = list(range(6))
    litdata.optimize(litdata_tokens, numbers, str(FILES / "litdata_tokens"), chunk_size=30, item_loader=loader, **one)
    (FILES / "webdataset").mkdir()
    with webdataset.ShardWriter(str(FILES / "webdataset" / "part-%02d.tar"), maxcount=4) as writer:
        for i in range(COUNT):
            writer.write({"__key__": f"sub/{i:03d}", "cls": i, "txt": f"text ä {i}", "seg.json": {"k": i}})


if __name__ == "__main__":
    main()
