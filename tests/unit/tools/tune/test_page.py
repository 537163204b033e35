"""What is found is told, and drawn."""

from dataclasses import replace
from pathlib import Path

from samestep.recipes.parse import load_recipe
from samestep.tools.timed import Spread, Timed
from samestep.tools.tune.choice import Place
from samestep.tools.tune.look import Look
from samestep.tools.tune.memory import Memory
from samestep.tools.tune.page import draw, lines, table
from samestep.tools.tune.rules import RULES, Rule, Tried, candidates
from samestep.tools.tune.search import Found, search
from samestep.tools.tune.setting import Setting, grid
from samestep.tools.tune.tuning import Tuning

RECIPE = load_recipe("digits", [])
SEEN = Look(device="cpu", workers=0, peak=10**9, norms=3, dropouts=1, has_images=True)


def found() -> Found:
    speeds = {0: 50.0, 1: 100.0, 2: 200.0, 4: 150.0}
    return search(lambda s: Timed(0.1, 0.5, speeds[s.workers]), grid(list(speeds), [2, 4]), Setting(0))


def tuning() -> Tuning:
    memory = Memory(None, 8, 8, True, 2**30)
    place = Place.of("digits", RECIPE, 2, {"processor": "a processor", "cores": 2, "gpus": []})
    tried = [
        Tried(Rule("step.threads", 2), Spread(1.5, 1.4, 1.6)),
        Tried(Rule("step.channels_last", True), Spread(1.02, 0.9, 1.1)),
        Tried(Rule("step.compile", True), reason="no compiler"),
    ]
    return Tuning(place, {}, memory, found(), {Setting(8): "killed"}, tried, 12.0)


def test_a_table_has_a_line_a_setting_that_had_a_turn() -> None:
    lines_of = list(table(found()).columns[0].cells)
    assert lines_of[0] == "0"
    verdicts = list(table(found()).columns[-1].cells)
    assert verdicts[0] == "slower (default)"
    assert sum(verdict.startswith("chosen") for verdict in verdicts) == 1


def test_everything_else_is_told_in_lines() -> None:
    said = dict(lines(tuning(), 7))
    assert said["chosen"] == "2 workers, prefetch 2: 4.00 times as fast as no workers; no result depends on it"
    assert said["not run"] == "8 workers, prefetch 2, nor more: killed"
    assert said["threads=2"].endswith("--set step.threads=2")
    assert said["channels_last=true"] == "steps 1.02 ± 0.10 times as fast"
    assert said["compile=true"] == "cannot run here: no compiler"
    assert said["memory"] == "a shard of 8 samples fits; a rank took 1 GiB"


def test_what_does_not_fit_is_told_with_what_would_change() -> None:
    memory = Memory(2**30, 2, 32, False, None, {4: False, 8: True}, ("dropout draws other masks",), "no memory")
    short = replace(tuning(), memory=memory, found=None)
    assert list(lines(short, 7)) == [
        (
            "memory",
            "a shard of 32 samples does not fit in 1 GiB; with shards: 8 it would. That changes: dropout draws other "
            "masks",
        )
    ]
    none = replace(memory, tried={4: False})
    assert "nor does one of a single sample: no memory" in dict(lines(replace(short, memory=none), 7))["memory"]


def test_all_of_it_is_data() -> None:
    data = tuning().as_data()
    assert data["choice"] == {"workers": 2, "prefetch": 2}
    assert data["default"] == {"workers": 0, "prefetch": 2}
    assert [each["reason"] for each in data["rules"]] == ["", "", "no compiler"]
    assert sum(len(row["turns"]) for row in data["settings"]) == data["turns"]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw(found(), "digits on 2 ranks", tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_known_beforehand() -> None:
    several = list(candidates(RECIPE, SEEN, RULES, cores=8, processes=2))
    assert [str(each) for each in several] == [
        "step.threads=2",
        "step.threads=4",
        "step.channels_last=true",
        "step.compile=true",
    ]
    assert "no core to spare" in reason_of(SEEN, "threads", cores=2)
    assert "GPUs" in reason_of(replace(SEEN, device="cuda"), "threads", cores=8)
    assert "images" in reason_of(replace(SEEN, has_images=False), "channels-last", cores=8)


def reason_of(seen: Look, rule: str, cores: int) -> str:
    """Why a rule cannot be measured for two ranks."""
    (tried,) = candidates(RECIPE, seen, [rule], cores, processes=2)
    assert isinstance(tried, Tried)
    return tried.reason


def test_a_rule_changes_one_key_of_the_recipe() -> None:
    changed = Rule("step.channels_last", True).applied(RECIPE)
    assert changed == replace(RECIPE, step=replace(RECIPE.step, channels_last=True))
