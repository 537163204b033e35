"""Hook of mkdocs: writes all pages that a person reads to `llms-full.txt` of the site (https://llmstxt.org)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDERS = ("start", "concepts", "guides", "reference")


def full_text(docs: Path) -> str:
    """Return `llms.txt` and the English pages without the decisions, each after its path."""
    pages = [path for folder in FOLDERS for path in sorted((docs / folder).rglob("*.md"))]
    parts = [(docs / "llms.txt").read_text(encoding="utf-8")]
    for path in [docs / "security.md", *pages]:
        if not path.name.endswith(".zh.md"):
            text = path.read_text(encoding="utf-8")
            parts.append(f"<!-- {path.relative_to(docs).as_posix()} -->\n\n{text}")
    return "\n".join(parts)


def on_post_build(config: Any) -> None:
    """Write the file next to `llms.txt`."""
    text = full_text(Path(config.docs_dir))
    (Path(config.site_dir) / "llms-full.txt").write_text(text, encoding="utf-8")
