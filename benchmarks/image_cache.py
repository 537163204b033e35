"""Images per second of one core from a cache, compared with the pipeline of tutorials: Pillow and torchvision.

JPEG files of 500x375 pixels in the page cache. As in the shipped recipes, the decoder is simplejpeg, and images are
bytes. Each pipeline delivers batches of 32 samples, as a loader worker does: the tutorial by torchvision's transforms
and torch's collate function, Samestep by its own, with a seed per sample. The pipelines take turns; times are processor
times of this process with one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from machine import Spread, describe_machine, machine_line, markdown_table, save
from PIL import Image
from samestep.data.microbatch_dataset import MicrobatchDataset, MicrobatchRequest
from torch.utils.data import default_collate

from samestep.config import DataConfig
from samestep.distributed.env import variables_of_subprocess
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.images.datasets import load_images
from samestep.zoo.images.decoders import as_pixels
from samestep.zoo.images.transforms import MEAN, STD

make_torchvision_importable()

from torchvision import transforms  # noqa: E402

HERE = Path(__file__).parent
BATCH = 32
TUTORIAL = "tutorial: Pillow and torchvision"
AGAIN = "tutorial, again"
FIXED = {"shorter_side": 256}
CROP = {"shorter_side": 256, "augment": {"scale": None}}
Batches = Callable[[int], Any]  # from the number of a batch to its data


def write_files(folder: Path, count: int) -> list[Path]:
    """Write photographs: smooth shapes and noise, of about the size of ImageNet's files."""
    generator = numpy.random.default_rng(0)
    files = []
    for number in range(count):
        file = folder / f"class{number % 2}" / f"{number:04}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=numpy.uint8)).resize((500, 375))
        noise = generator.integers(-20, 21, (375, 500, 3))
        Image.fromarray((numpy.asarray(coarse) + noise).clip(0, 255).astype(numpy.uint8)).save(file, quality=90)
        files.append(file)
    return files


def tutorial(files: list[Path]) -> Batches:
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

    def batch(number: int) -> Any:
        samples = []
        for index in range(number * BATCH, (number + 1) * BATCH):
            with files[index % len(files)].open("rb") as file:
                image = Image.open(file).convert("RGB")
            samples.append((transform(image), index % 2))
        return default_collate(samples)

    return batch


def pipeline(folder: Path, cache: str, *, is_training: bool = True, **options: Any) -> Batches:
    """Return the batches of a recipe; the evaluation has the same files."""
    splits = load_images(str(folder), evaluation_path=str(folder), decoder="simplejpeg", **options)
    if cache != "none":
        assert splits.open_cache is not None
        splits.open_cache(DataConfig(name="images", cache=cache))  # type: ignore[arg-type]
    dataset = splits.train if is_training else splits.evaluation
    reader, size = MicrobatchDataset(dataset, splits.collate, seed=0), len(dataset)
    return lambda number: reader[MicrobatchRequest(0, 0, numpy.arange(number * BATCH, (number + 1) * BATCH) % size)]


def copies(folder: Path, **options: Any) -> Batches:
    """Return batches of copies of cached images, without a transform."""
    splits = load_images(str(folder), decoder="simplejpeg", **options)
    assert splits.open_cache is not None
    splits.open_cache(DataConfig(name="images", cache="decoded"))
    samples, read = splits.train.samples, splits.train._read  # type: ignore[attr-defined]

    def batch(number: int) -> Any:
        indices = range(number * BATCH, (number + 1) * BATCH)
        files = [samples[index % len(samples)].source for index in indices]
        return [as_pixels(read(file, "")).clone() for file in files]

    return batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/image_cache.py --rounds 20",
    )
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=4, help="of 32 images in each turn (default: 4)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "image_cache.json")
    options = parser.parse_args()
    machine = describe_machine()
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary, variables_of_subprocess({"XDG_CACHE_HOME": temporary}):
        folder = Path(temporary) / "photos"
        files = write_files(folder, options.files)
        contenders = {
            TUTORIAL: tutorial(files),
            AGAIN: tutorial(files),
            "no cache: training": pipeline(folder, "none"),
            "decoded: copy of the image": copies(folder),
            "decoded: evaluation": pipeline(folder, "decoded", is_training=False),
            "decoded: training, crop with resize": pipeline(folder, "decoded"),
            "shorter side 256: copy of the image": copies(folder, **FIXED),
            "shorter side 256: evaluation": pipeline(folder, "decoded", is_training=False, **FIXED),
            "shorter side 256: training, crop with resize": pipeline(folder, "decoded", **FIXED),
            "shorter side 256: training, crop without resize": pipeline(folder, "decoded", **CROP),
        }
        speeds, first = measure(contenders, options.rounds, options.batches, len(files) // BATCH)
        size = sum(file.stat().st_size for file in files) / len(files)
    rows, results = [], {}
    for name, values in speeds.items():
        ratios = [value / base for value, base in zip(values, speeds[TUTORIAL], strict=True)]
        speed, ratio = Spread.of(values), Spread.of(ratios)
        results[name] = {"images_per_second": speed.rounded(1), "ratio": ratio.rounded(3), "first_epoch": first[name]}
        cells = [
            f"{speed.median:,.0f}",
            f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})",
            f"{first[name]:,.0f}",
        ]
        rows.append([name, *cells])
    header = ["pipeline", "images/s per core", "ratio to the tutorial (quartiles)", "images/s in the first epoch"]
    text = f"JPEG files of 500x375 pixels, {size / 1000:.0f} kB each; {options.rounds} rounds."
    page = "\n\n".join(["# Images from a cache", machine_line(machine), text, markdown_table(header, rows)]) + "\n"
    settings = {"files": options.files, "rounds": options.rounds, "batches": options.batches, "file_bytes": round(size)}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, page)
    print(page)


def measure(
    contenders: dict[str, Batches], rounds: int, batches: int, epoch: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return images per second in every round, and those of the first epoch, in which caches are built."""

    def turn(batch: Batches, numbers: range) -> float:
        began = time.process_time()
        for number in numbers:
            batch(number)
        return len(numbers) * BATCH / (time.process_time() - began)

    first = {name: round(turn(batch, range(epoch)), 1) for name, batch in contenders.items()}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders)
        for name in names if number % 2 else names[::-1]:
            speeds[name].append(turn(contenders[name], range(number * batches, (number + 1) * batches)))
    return speeds, first


if __name__ == "__main__":
    main()
