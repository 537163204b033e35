"""Processor time per training image from JPEG files of photo size to batches, in one process with one thread.

The pipeline of PyTorch's tutorials (Pillow, RandomResizedCrop 224, flip, ToTensor, Normalize) and that of recipes with
each decoder take turns on the same files, crops of the two photos in scikit-learn. With `simplejpeg`, batches are
bytes, which the device normalizes; one more row adds the normalization on the same processor. NVIDIA DALI takes part if
it is installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import sklearn.datasets
import torch
from machine import Spread, describe_machine, machine_line, markdown_table, save
from PIL import Image, features
from torch.utils.data import default_collate

from samestep.zoo.image_transforms import MEAN, STD, ImageTransforms, collate_images

from torchvision import transforms as tutorial  # isort: skip  # after the preparation for a CPU-only torch

HERE = Path(__file__).parent
WIDTH, HEIGHT, SIZE = 500, 375, 224
LARGE = 8  # factor of the photos of a camera
TUTORIAL = "Pillow + torchvision (tutorials)"
NAMES = {
    "pillow": "`decoder: pillow`",
    "simplejpeg": "`decoder: simplejpeg`, bytes",
    "normalized": "`decoder: simplejpeg`, normalized on the CPU",
    "dali": "NVIDIA DALI, CPU",
}


def write_photos(folder: Path, count: int, quality: int, factor: int) -> list[Path]:
    """Write crops of two photos with 500 x 375 pixels times `factor`."""
    generator, root = numpy.random.default_rng(0), Path(sklearn.datasets.__file__).parent / "images"
    paths = []
    for number in range(count):
        with Image.open(root / ("china.jpg", "flower.jpg")[number % 2]) as photo:
            width = int(photo.width * generator.uniform(0.8, 0.85))
            height = width * HEIGHT // WIDTH
            left, top = (int(generator.integers(0, rest + 1)) for rest in (photo.width - width, photo.height - height))
            crop = photo.resize((WIDTH * factor, HEIGHT * factor), box=(left, top, left + width, top + height))
        paths.append(folder / f"{number}.jpg")
        crop.save(paths[-1], quality=quality)
    return paths


def contenders(paths: Sequence[Path]) -> dict[str, Callable[[], Any]]:
    """Return functions that make one batch of all files."""
    transform = tutorial.Compose(
        [
            tutorial.RandomResizedCrop(SIZE),
            tutorial.RandomHorizontalFlip(),
            tutorial.ToTensor(),
            tutorial.Normalize(MEAN, STD),
        ]
    )

    def of_tutorial() -> torch.Tensor:
        images = []
        for path in paths:
            with path.open("rb") as file:
                images.append(transform(Image.open(file).convert("RGB")))
        return default_collate(images)  # type: ignore[no-any-return]

    def of_recipe(decoder: Any, *, is_normalized: bool) -> Callable[[], torch.Tensor]:
        transforms = ImageTransforms(SIZE, 0.875, "bilinear", MEAN, STD, decoder)
        read, convert = transforms.reader(), transforms.train()

        def batch() -> torch.Tensor:
            images = collate_images([(convert(read(path, str(path))), 0) for path in paths])[0]
            return transforms.normalize(images) if is_normalized else images  # type: ignore[no-any-return]

        return batch

    return {
        TUTORIAL: of_tutorial,
        "pillow": of_recipe("pillow", is_normalized=False),
        "simplejpeg": of_recipe("simplejpeg", is_normalized=False),
        "normalized": of_recipe("simplejpeg", is_normalized=True),
        **({"dali": dali(paths)} if find_spec("nvidia") and find_spec("nvidia.dali") else {}),
    }


def dali(paths: Sequence[Path]) -> Callable[[], Any]:
    """Return DALI's pipeline with one thread on the CPU, which decodes only the crop."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=len(paths), num_threads=1, device_id=None, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        data, _ = fn.readers.file(files=[str(path) for path in paths], random_shuffle=False)
        images = fn.decoders.image_random_crop(data, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
        images = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        return fn.crop_mirror_normalize(images, mean=mean, std=std, mirror=fn.random.coin_flip())

    built = pipeline()
    built.build()
    return built.run


def measure(paths: Sequence[Path], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of processor time per image of every round."""
    makers = contenders(paths)
    times: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(rounds + 1):  # the first is a warm-up
        for name in list(makers) if number % 2 else reversed(makers):
            began = time.process_time()
            makers[name]()
            if number:
                times[name].append(1000 * (time.process_time() - began) / len(paths))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/image_loading.py --rounds 40",
    )
    parser.add_argument("--images", type=int, default=32, help="in a batch (default: 32)")
    parser.add_argument("--quality", type=int, nargs="+", default=[85, 90, 95])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "image_loading.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    machine["libjpeg_turbo"] = features.version("libjpeg_turbo")
    cases = [(quality, 1, options.images, options.rounds) for quality in options.quality]
    cases.append((90, LARGE, max(2, options.images // 8), max(3, options.rounds // 4)))
    results: list[dict[str, Any]] = []
    for quality, factor, count, rounds in cases:
        with TemporaryDirectory() as folder:
            paths = write_photos(Path(folder), count, quality, factor)
            times = measure(paths, rounds)
            kilobytes = sum(path.stat().st_size for path in paths) / len(paths) / 1000
        for name, values in times.items():
            ratios = [base / value for base, value in zip(times[TUTORIAL], values, strict=True)]
            spreads = {"ms": Spread.of(values).rounded(3), "speedup": Spread.of(ratios).rounded(2)}
            pixels = f"{WIDTH * factor}x{HEIGHT * factor}"
            results.append({"pixels": pixels, "quality": quality, "kB": round(kilobytes), "pipeline": name, **spreads})
    rows = [
        [
            f"{row['pixels']}, quality {row['quality']}, {row['kB']} kB",
            NAMES.get(row["pipeline"], row["pipeline"]),
            f"{row['ms']['median']:.2f}",
            f"{1000 / row['ms']['median']:.0f}",
            f"{row['speedup']['median']:.2f} ({row['speedup']['q1']:.2f} to {row['speedup']['q3']:.2f})",
        ]
        for row in results
    ]
    text = markdown_table(["files", "pipeline", "ms per image", "images/s per core", "speed-up (quartiles)"], rows)
    print(text)
    title = f"# Training images from JPEG files\n\n{machine_line(machine)}\n\n"
    settings = {"images": options.images, "rounds": options.rounds, "size": SIZE}
    save(options.output, {"machine": machine, "settings": settings, "results": results}, f"{title}{text}\n")


if __name__ == "__main__":
    main()
