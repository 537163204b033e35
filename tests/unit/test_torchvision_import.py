"""Import of torchvision by programs of the development environment."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
PROGRAM = """
import site
site.addsitedir(sys.argv[1])
assert not {"torch", "typing", "pathlib"} & (set(sys.modules) - before), "the start of Python stays fast"
assert find_spec("torchvision")
assert "torch" not in sys.modules, "a look for torchvision imports nothing"
import torchvision
assert torchvision.models.resnet18(num_classes=3)(__import__("torch").zeros(2, 3, 32, 32)).shape == (2, 3)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_pth_file_of_the_makefile_makes_torchvision_importable(tmp_path: Path) -> None:
    (line,) = re.findall(r"echo '(import samestep.*)'", MAKEFILE.read_text(encoding="utf-8"))
    (tmp_path / "samestep-torchvision.pth").write_text(line + "\n", encoding="utf-8")
    code = "import sys; from importlib.util import find_spec; before = set(sys.modules)" + PROGRAM
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=120)
