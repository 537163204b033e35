"""Layouts under `--exact` have the bits of one process. `--exactness-page` writes docs/concepts/exactness.md.

Layouts with a tensor axis are compared with one process that divides its products into as many slices.
"""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers.small_recipes import DIGITS, IMAGES
from helpers.system import Running, here, last_saved, weights
from samestep.errors import EXIT_DONE

PAGE = Path(__file__).parents[2] / "docs/concepts/exactness.md"
_HEADING = "## Layouts"


def write_table(recipes: Sequence[str], layouts: Sequence[str], held: Sequence[tuple[str, str, str, int]]) -> None:
    """Replace the table below the heading `Layouts`; the text around it is unchanged.

    Args:
        recipes: the columns.
        layouts: the rows.
        held: recipe, precision, layout and number of ranks with the bits of one process.
    """
    rows = [["layout", "precision", *recipes], ["---"] * (2 + len(recipes))]
    for layout in layouts:
        for precision in ("fp32", "bf16"):
            cells = [
                ", ".join(str(ranks) for *case, ranks in held if case == [recipe, precision, layout])
                for recipe in recipes
            ]
            if any(cells):
                rows.append([f"`{layout}`", precision, *cells])
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(number for number in range(lines.index(_HEADING), len(lines)) if lines[number].startswith("|"))
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    lines[first:end] = ["| " + " | ".join(row) + " |" for row in rows]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


# Settings of each recipe, and the division of its products.
RECIPES = {
    "digits": DIGITS,
    "tokens": ("epochs=1", "data.options.lines=250", "metrics=[]"),
    "images": IMAGES,
    "language": (
        "data.options.train_tokens=4608",
        "data.options.evaluation_tokens=512",
        "batch_size=16",
        "microbatches=8",
        "model.options={n_embd: 64, n_layer: 3, dropout: 0.1, block_size: 64}",
    ),
}
PLANS = {"digits": ("step.tensor_plan={'head': row}",), "images": ("step.tensor_plan={'fc': row}",)}
SLICES = ("step.tensor_slices=4",)
# Mesh by strategy and number of ranks.
LAYOUTS = {
    "ddp": {2: "", 3: "", 4: "", 8: ""},
    "fsdp": {2: "", 3: ""},
    "hsdp": {4: "replicate=2,shard=2"},
    "tp": {2: "", 4: ""},
    "ddp x tp": {4: "replicate=2,tensor=2", 8: "replicate=2,tensor=4"},
}
IN_BF16 = (2, 4)
CASES = [
    (recipe, precision, layout, ranks)
    for recipe in RECIPES
    for precision in ("fp32", "bf16")
    for layout, meshes in LAYOUTS.items()
    for ranks in meshes
    if precision == "fp32" or ranks in IN_BF16
]
_held: list[tuple[str, str, str, int]] = []


@pytest.fixture(scope="module", autouse=True)
def page(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--exactness-page"):
        assert _held == CASES, "the page is written from all cases"
        write_table(list(RECIPES), list(LAYOUTS), _held)


@pytest.fixture(scope="module")
def root(pictures: Path) -> Path:
    """A folder with pictures of two classes."""
    return pictures.parent


def settings(root: Path, recipe: str, precision: str, *, is_sliced: bool) -> list[str]:
    sliced = (*SLICES, *PLANS.get(recipe, ())) if is_sliced else ()
    path = (f"data.options.path={root / 'pictures'}",) if recipe == "images" else ()
    return [*RECIPES[recipe], *sliced, *path, f"step.precision={precision}"]


def has_slices(layout: str) -> bool:
    return "tp" in layout


def layout_options(layout: str, ranks: int) -> list[object]:
    mesh = LAYOUTS[layout][ranks]
    strategy = layout.partition(" ")[0]
    return ["--processes", ranks, "--strategy", strategy, *(["--mesh", mesh] if mesh else [])]


def trained(root: Path, recipe: str, precision: str, layout: str, ranks: int) -> tuple[str, str]:
    """Return the SHA-256 of weights and optimizer state; a layout is trained once."""
    is_sliced = has_slices(layout)
    name = f"{recipe}-{precision}-{layout}-{ranks}".replace(" ", "")
    if not (root / "runs" / name).exists():
        options = layout_options(layout, ranks) if ranks > 1 else []
        arguments = settings(root, recipe, precision, is_sliced=is_sliced)
        assert here("train", recipe, "--exact", "--name", name, *options, *arguments, cwd=root) == EXIT_DONE
    return weights(root / "runs" / name)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "precision", "layout", "ranks"), CASES)
def test_layout_has_the_bits_of_one_process(root: Path, recipe: str, precision: str, layout: str, ranks: int) -> None:
    alone = trained(root, recipe, precision, "tp" if has_slices(layout) else "ddp", 1)
    assert trained(root, recipe, precision, layout, ranks) == alone
    _held.append((recipe, precision, layout, ranks))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["digits", "tokens", "language"])
def test_run_killed_in_two_layouts_ends_with_the_same_bits(root: Path, recipe: str) -> None:
    """Killed under tp on 2, resumed and killed under ddp x tp on 4, ended under ddp on 1."""
    arguments = [*settings(root, recipe, "fp32", is_sliced=True), "epochs=3", "--checkpoint-every", 2]
    name = f"{recipe}-killed"
    assert here("train", recipe, "--exact", "--name", f"{name}-not", *arguments, cwd=root) == EXIT_DONE
    run = root / "runs" / name
    tensor, product = layout_options("tp", 2), layout_options("ddp x tp", 4)
    commands = (("train", recipe, "--exact", "--name", name, *tensor, *arguments), ("resume", run, *product))
    for step, command in zip((3, 7), commands, strict=True):
        with Running(*command, cwd=root) as running:
            running.until(lambda: last_saved(run) > step, "a checkpoint")  # noqa: B023
            running.kill(signal.SIGKILL)
    assert here("resume", run, "--processes", 1, "--strategy", "ddp", cwd=root) == EXIT_DONE
    assert weights(run) == weights(root / "runs" / f"{name}-not")
