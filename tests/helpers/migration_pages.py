"""Migration pages: text of each page around the diff between the two scripts of a pair."""

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/migrate"
PAGES = ROOT / "docs/start/migrate"
NAMES = {
    "plain": "plain",
    "data_parallel": "data-parallel",
    "ddp": "ddp",
}


def diff_lines(name: str) -> list[str]:
    """Return the diff lines without docstrings: ` ` in both scripts, `-` before, `+` after."""
    before, after = ((EXAMPLES / f"{name}_{side}.py").read_text(encoding="utf-8") for side in ("before", "after"))
    lines = difflib.unified_diff(before.splitlines()[2:], after.splitlines()[2:], n=1000, lineterm="")
    return [line.rstrip() for line in lines if not line.startswith(("---", "+++", "@@"))]


def line_counts(lines: list[str]) -> str:
    """Return a sentence with the numbers of removed and added lines, without empty lines."""
    removed, added = (sum(line.startswith(sign) and bool(line[1:].strip()) for line in lines) for sign in "-+")
    return f"{removed} lines removed, {added} added."


def page(name: str) -> Path:
    """Return the path of a page."""
    return PAGES / f"{NAMES[name]}.md"


def updated_page(name: str) -> str:
    """Return the text of a page with the current diff."""
    text = page(name).read_text(encoding="utf-8")
    head, _, rest = text.partition("```diff\n")
    tail = rest.partition("added.\n")[2]
    lines = diff_lines(name)
    return "\n".join([f"{head}```diff", *lines, "```", "", line_counts(lines), tail])


def chinese_pages() -> dict[Path, Path]:
    """Return the English page of each Chinese page."""
    paths = sorted((ROOT / "docs").rglob("*.zh.md"))
    return {path: path.with_name(path.name.replace(".zh.md", ".md")) for path in paths}


if __name__ == "__main__":
    for name in NAMES:
        page(name).write_text(updated_page(name), encoding="utf-8")
        chinese = page(name).with_suffix(".zh.md")
        if chinese.exists():
            head, _, rest = chinese.read_text(encoding="utf-8").partition("```diff\n")
            tail = rest.partition("\n```\n")[2]
            diff = "\n".join(diff_lines(name))
            chinese.write_text(f"{head}```diff\n{diff}\n```\n{tail}", encoding="utf-8")
