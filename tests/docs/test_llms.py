"""Files for language models: links of `llms.txt` (https://llmstxt.org), pages in `llms-full.txt`, and `SKILL.md`."""

import re
from pathlib import Path
from runpy import run_path

import yaml

from samestep.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_link_leads_to_a_page() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if not (DOCS / link).is_file()] == []


def test_full_text_has_every_page_once() -> None:
    text = run_path(str(DOCS / "reference" / "llms_full.py"))["full_text"](DOCS)
    found = re.findall(r"^<!-- (\S+\.md) -->$", text, re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if not path.name.endswith(".zh.md")}
    assert len(found) == len(set(found))
    assert set(found) == {page for page in pages if not page.startswith("decisions/")} - {"index.md"}


def test_skill_names_commands_and_pages_that_exist() -> None:
    skill = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    front = yaml.safe_load(skill.split("---\n")[1])
    assert set(front) == {"name", "description"}
    assert len(front["description"]) <= 1024
    commands = set(re.findall(r"samestep (\w+)", skill))
    assert {"run", "verify", "audit", "diff"} <= commands <= set(COMMANDS)
    pages = re.findall(r"`(docs/[\w/.-]+)`", skill)
    assert len(pages) >= 3
    assert [page for page in pages if not (ROOT / page).is_file()] == []
