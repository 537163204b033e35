"""Language of source and documents: rates of patterns that are rare in technical English, and banned identifiers."""

import ast
import re
from collections import Counter
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


@cache
def read(path: Path) -> tuple[str, list[str]]:
    """Return the prose of a file, and the words of its identifiers.

    Prose is comments, docstrings and strings of at least three words; or Markdown without code blocks.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL), []
    pieces = re.findall(r"(?:^|\s)#+ (.*)$", text, re.MULTILINE)
    words: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and len(node.value.split()) >= 3:
                pieces.append(node.value)
            continue
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                words += name.lower().strip("_").split("_")
    return "\n".join(pieces), words


def rates(texts: list[str]) -> dict[str, float]:
    """Return the occurrences of each pattern per 1,000 words."""
    text = "\n".join(texts).lower()
    words = Counter(re.findall(r"\w+", text))
    total = len(re.findall(r"[a-z']+", text))
    hits = {}
    for pattern in LIMITS:
        if " " in pattern:
            hits[pattern] = len(re.findall(rf"\b({pattern})\b", text))
        else:
            hits[pattern] = sum(count for word, count in words.items() if re.fullmatch(pattern, word))
    return {pattern: 1000 * count / total for pattern, count in hits.items()}


@pytest.mark.parametrize("group", GROUPS)
def test_rates(group: str) -> None:
    values = rates([read(path)[0] for path in GROUPS[group]])
    assert {pattern: value for pattern, value in values.items() if round(value, 2) > LIMITS[pattern]} == {}


def test_identifiers() -> None:
    counts = Counter(word for path in GROUPS["source"] for word in read(path)[1] if BANNED_IDENTIFIERS.fullmatch(word))
    assert counts.total() < MAX_BANNED, counts


def test_rate_counts_words() -> None:
    values = rates(["a rank asks", "It goes on", "and asked nobody who asks"])
    assert values[r"asks?|asked"] == pytest.approx(1000 * 3 / 11)
    assert values[r"(go|goes|went|going) on"] == pytest.approx(1000 * 1 / 11)
    assert values[r"where"] == 0


def test_prose_and_identifiers_of_python(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Told by who."""\nfound_it = "a b c"  # says it\nx = "short"\n', encoding="utf-8")
    prose, words = read(path)
    assert set(prose.splitlines()) == {"Told by who.", "a b c", "says it"}
    assert words == ["found", "it", "x"]
