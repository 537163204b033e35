"""Language of source and documents: rates of patterns that are rare in technical English, and banned identifiers."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = {
    "source": sorted((ROOT / "src").rglob("*.py")),
    "tests": sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)),
    "benchmarks": sorted((ROOT / "benchmarks").rglob("*.py")),
    "documents": [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"],
}
# Occurrences per 1,000 words: twice the highest rate of Fabric, torchtitan, httpx, pluggy, accelerate and composer.
LIMITS = {
    r"what|who|whose|whoever|whom": 1.8,
    r"tells?|told|telling": 0.2,
    r"says?|said|saying": 0.2,
    r"hears?|heard": 0.0,
    r"nobody|somebody|whoever|anybody": 0.0,
    r"(go|goes|went|going) on": 0.2,
    r"asks?|asked": 0.4,
    r"meets?|met|meeting": 0.2,
    r"besides?|anew|mend(s|ed|ing)?|till|whence|hence|lest|likewise": 0.2,
    r"where": 2.6,
    r"its?": 13.0,
}
BANNED_IDENTIFIERS = re.compile(r"found|said|told|tell|given|mine|wishes|heard|hear|mend\w*")
MAX_BANNED = 30


def identifiers(text: str) -> Iterator[str]:
    """Yield the words of all identifiers in Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield from token.string.lower().strip("_").split("_")


@cache
def prose(path: Path) -> str:
    """Return comments, docstrings and strings of at least three words; or Markdown without code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 3
    ]
    return "\n".join(comments + strings)


def rate(pattern: str, texts: list[str]) -> float:
    """Return the occurrences of a pattern per 1,000 words."""
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    hits = sum(len(re.findall(rf"\b({pattern})\b", text, re.IGNORECASE)) for text in texts)
    return 1000 * hits / words


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("pattern", LIMITS)
def test_rate(group: str, pattern: str) -> None:
    value = rate(pattern, [prose(path) for path in GROUPS[group]])
    assert round(value, 2) <= LIMITS[pattern]


def test_identifiers() -> None:
    counts = Counter(
        word
        for path in GROUPS["source"]
        for word in identifiers(path.read_text(encoding="utf-8"))
        if BANNED_IDENTIFIERS.fullmatch(word)
    )
    assert counts.total() < MAX_BANNED, counts


def test_rate_counts_words() -> None:
    assert rate(r"asks?", ["a rank asks", "it asked nobody who asks"]) == pytest.approx(1000 * 2 / 8)


def test_prose_and_identifiers_of_python(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Told by who."""\nfound_it = "a b c"  # says it\nx = "short"\n', encoding="utf-8")
    assert set(prose(path).splitlines()) == {"Told by who.", "a b c", "says it"}
    assert "found" in list(identifiers(path.read_text(encoding="utf-8")))
