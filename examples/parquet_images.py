"""Write a folder with one folder of images per class to Parquet files: `python examples/parquet_images.py pictures`."""

import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

FILES = 5  # the last one is for the evaluation


def main() -> None:
    paths = sorted(Path(sys.argv[1]).glob("*/*.jpg"))
    random.Random(0).shuffle(paths)
    for number in range(FILES):
        folder = Path("photos_val" if number == FILES - 1 else "photos")
        folder.mkdir(exist_ok=True)
        rows = [
            {"image": path.read_bytes(), "label": path.parent.name} for path in paths[number::FILES]
        ]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), folder / f"{number}.parquet", row_group_size=20
        )


main()
