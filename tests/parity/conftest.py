"""Pictures of the recipes for images."""

from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of small JPEGs whose pixels are a function of their number."""
    root = tmp_path_factory.mktemp("parity") / "pictures"
    for number in range(60):
        folder = root / ("dark" if number % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        size = (40 + number, 70 - number // 2)
        data = bytes((number * 7 + 13 * i + (i * i) // 5) % 256 for i in range(size[0] * size[1]))
        Image.frombytes("L", size, data).convert("RGB").save(folder / f"{number:02}.jpg")
    return root
