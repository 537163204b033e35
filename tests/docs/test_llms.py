"""Links of `llms.txt` (https://llmstxt.org), which mkdocs does not check."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_every_link_leads_to_a_page() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if not (DOCS / link).is_file()] == []
