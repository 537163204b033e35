"""Plain scripts of `scripts/`: expectation in the header, and the source with the added line.

The first lines of a script are comments:

    # expect: divided | whole: WORDS OF A REASON | mixed | mixed: WORDS | error: E_CODE [E_CODE...]
                             "whole: WORDS | OTHER WORDS" if the reason depends on the number of processes
    # allows: E_CODE [E_CODE...]    errors that are right as well
    # tolerance: 1e-4        relative to the largest number of a line; 1e-10 if absent
    # tolerance: permuted    twice the deviation of a plain loop with the rows of batches in another order; its models
                             compute the halves of a batch one after the other
    # processes: 2,3         1,2,3,4 if absent
    # needs: lightning       packages without which the script is skipped
    # imports: torch.export   slow modules that are imported before the processes of all scripts are forked
    # environment: hidden     the ranks are joined before the script, which sees no variables of a launcher
    # numbers: vary          two runs of plain Python differ; only the verdict is checked
    # limit: 120             seconds; 60 if absent

The added line is a comment that begins with a plus sign, at its place in the script:

    # + model = samestep.parallel(model)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).parent / "scripts"
PROCESSES = (1, 2, 3, 4)
TOLERANCE = 1e-10
LIMIT_SECONDS = 60.0
PERMUTED = "permuted"
HELPERS = {"common"}
KEYS = {"allows", "environment", "expect", "imports", "limit", "needs", "numbers", "processes", "tolerance"}

Expectation = Literal["divided", "whole", "mixed", "error"]

_HEADER = re.compile(r"# ([a-z]+): (.+)")
_ADDED = re.compile(r"^( *)# ?\+ ?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """One script and its expectation.

    Attributes:
        path: file of the script.
        expected: kind of the expected verdict.
        words: words of an expected reason, or expected error codes.
        allowed: codes of errors that are right as well.
        tolerance: relative tolerance of the numbers; None to measure it with permuted rows.
        processes: numbers of processes.
        needs: packages without which the script is skipped.
        imports: modules that are imported once for all scripts.
        hides_environment: the script sees no variables of a launcher, as under `samestep run`.
        numbers_vary: two runs of plain Python differ.
        limit: seconds after which a run is taken as hanging.
    """

    path: Path
    expected: Expectation
    words: str = ""
    allowed: tuple[str, ...] = ()
    tolerance: float | None = TOLERANCE
    processes: tuple[int, ...] = PROCESSES
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    hides_environment: bool = False
    numbers_vary: bool = False
    limit: float = LIMIT_SECONDS

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def missing(self) -> list[str]:
        """Needed packages that are not installed."""
        return [package for package in self.needs if find_spec(package) is None]

    @cached_property
    def source(self) -> str:
        """The script as plain Python runs it."""
        return self.path.read_text(encoding="utf-8")

    @property
    def source_with_line(self) -> str:
        """The script with the added line. The import takes the place of the first comment, so line numbers stay."""
        return self._with_line("import samestep", "")

    @property
    def source_with_halves(self) -> str:
        """The plain script; its models compute the halves of a batch one after the other."""
        return self._with_line("import common", "common.halved")

    def _with_line(self, first_line: str, function: str) -> str:
        source = _ADDED.sub(r"\1\2", self.source)
        if function:
            source = source.replace("samestep.parallel", function)
        _, rest = source.split("\n", 1)
        return f"{first_line}\n{rest}"


def read_script(path: Path) -> Script:
    """Return the script of a file.

    Raises:
        ValueError: the header has no expectation or an unknown one, or the added line is missing.
    """
    source = path.read_text(encoding="utf-8")
    header: dict[str, str] = {}
    for line in source.splitlines():
        if not line.startswith("#"):
            break
        match = _HEADER.fullmatch(line.strip())
        if match is not None:
            header[match[1]] = match[2].strip()
    unknown = sorted(header.keys() - KEYS)
    if unknown:
        raise ValueError(f"{path.name}: unknown keys of the header: {', '.join(unknown)}")
    kind, _, words = header.get("expect", "").partition(":")
    kind = kind.strip()
    if kind not in ("divided", "whole", "mixed", "error"):
        raise ValueError(f"{path.name}: the header has no line '# expect: divided', 'whole: WORDS', 'mixed' or 'error'")
    if _ADDED.search(source) is None:
        raise ValueError(f"{path.name}: there is no line '# + model = samestep.parallel(model)'")
    if not source.startswith("#"):
        raise ValueError(f"{path.name}: the first line is no comment")
    tolerance = header.get("tolerance", str(TOLERANCE))
    processes = header.get("processes")
    return Script(
        path=path,
        expected=kind,  # type: ignore[arg-type]
        words=words.strip(),
        allowed=tuple(header.get("allows", "").split()),
        tolerance=None if tolerance == PERMUTED else float(tolerance),
        processes=PROCESSES if processes is None else tuple(int(number) for number in processes.split(",")),
        needs=tuple(header.get("needs", "").replace(",", " ").split()),
        imports=tuple(header.get("imports", "").split()),
        hides_environment=header.get("environment") == "hidden",
        numbers_vary=header.get("numbers") == "vary",
        limit=float(header.get("limit", LIMIT_SECONDS)),
    )


def script_names() -> list[str]:
    """Return the names of all scripts."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in HELPERS)


def find_scripts(names: list[str]) -> list[Script]:
    """Return the scripts of these names; all scripts without names.

    Args:
        names: each `NAME`, or `NAME:2,3` to run the script on these numbers of processes only.
    """
    scripts = []
    for choice in names or script_names():
        name, _, numbers = choice.partition(":")
        script = read_script(SCRIPTS / f"{name}.py")
        if numbers:
            script = replace(script, processes=tuple(int(number) for number in numbers.split(",")))
        scripts.append(script)
    return scripts
