"""The pages on moving a script over: what stands around the difference between the two scripts of each pair."""

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/migrate"
PAGES = ROOT / "docs/migrate"
NAMES = {
    "plain": "plain",
    "data_parallel": "data-parallel",
    "ddp": "ddp",
    "accelerate": "accelerate",
    "lightning": "lightning",
}


def difference(name: str) -> list[str]:
    """The lines of both scripts: ` ` in both, `-` before, `+` after; without the line that says what each is."""
    before, after = ((EXAMPLES / f"{name}_{which}.py").read_text(encoding="utf-8") for which in ("before", "after"))
    lines = difflib.unified_diff(before.splitlines()[2:], after.splitlines()[2:], n=1000, lineterm="")
    return [line.rstrip() for line in lines if not line.startswith(("---", "+++", "@@"))]


def counted(lines: list[str]) -> str:
    """How many lines go and how many come, empty ones aside."""
    gone, come = (sum(line.startswith(sign) and bool(line[1:].strip()) for line in lines) for sign in "-+")
    return f"{gone} lines go, {come} come."


def page(name: str) -> Path:
    return PAGES / f"{NAMES[name]}.md"


def written(name: str) -> str:
    """The page with the difference as it is now."""
    text = page(name).read_text(encoding="utf-8")
    head, _, rest = text.partition("```diff\n")
    tail = rest.partition("come.\n")[2]
    lines = difference(name)
    return "\n".join([f"{head}```diff", *lines, "```", "", counted(lines), tail])


if __name__ == "__main__":
    for each in NAMES:
        page(each).write_text(written(each), encoding="utf-8")
