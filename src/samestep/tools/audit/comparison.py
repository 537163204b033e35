"""`samestep audit --against`: a training on two numbers of processes, and experiments on causes."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from samestep.errors import InputError
from samestep.tools.audit.step_findings import Summary, batches_per_update, differs
from samestep.tools.audit.worlds import Event, World, group_worlds, matching_passes, read_events
from samestep.tools.verify.causes import Cause
from samestep.units import plural

TOLERANCE = 1e-3  # relative, of norms and losses; ranks add in another order
_DRIFT = TOLERANCE / 20  # a distance of the step before that shows growing rounding
_SAME_RATIO = 1e-3
_STAGES = (
    *("parameters", "samples", "inputs", "loss", "gradients", "learning rates", "evaluation"),
    "number of steps",
)
GLOBAL_BATCH = "global batch size"
# Options of torchrun and of accelerate launch.
_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")
# Parts of a model that an experiment turns off, with the event that shows them.
_PARTS = {"dropout": "dropout", "batch norm": "batch_norm"}
_PART_CAUSES = {"dropout": Cause.MODEL_RANDOM.value, "batch norm": Cause.BATCH_NORM.value}

# Function of command, folder and parts to turn off; returns the exit code.
Run = Callable[[Sequence[str], Path, Sequence[str]], int]


@dataclass(frozen=True)
class Difference:
    """One quantity that differs, with a cause in the terms of `verify`."""

    quantity: str
    step: int
    cause: str
    evidence: list[str]

    @property
    def order_key(self) -> tuple[int, int]:
        """Position in a run: quantities of a step depend on those before."""
        return self.step, _STAGES.index(self.quantity)


@dataclass
class Trace:
    """Observations of one training, over all ranks."""

    world: World
    batches: list[list[Event]] = field(default_factory=list)  # of all ranks, by optimizer step
    losses: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    updates: dict[tuple[int, int], list[Event]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, world: World) -> Trace:
        """Collect the samples, losses and updates of each step."""
        trace = cls(world)
        size = max(1, round(batches_per_update(world)))
        for group in matching_passes(world):
            ranks = [one.batches for one in group.values() if one.trains]
            if len(ranks) == len(group):
                for start in range(0, max(map(len, ranks)), size):
                    stop = start + size
                    trace.batches.append([one for batches in ranks for one in batches[start:stop]])
        for rank in range(world.size):
            for event in world.ranks[rank]:
                if event["kind"] == "loss":
                    trace.losses[event["step"]].append(event)
                elif event["kind"] == "update":
                    trace.updates[event["step"], event["optimizer"]].append(event)
        return trace

    @property
    def steps(self) -> int:
        """Number of optimizer steps of rank 0."""
        return 1 + max(step for step, _ in self.updates)

    @property
    def processes(self) -> str:
        """Number of ranks as text."""
        return plural(self.world.size, "process")


def first_difference(reference: Trace, other: Trace) -> Difference | None:
    """Return the first quantity that differs between two trainings."""
    differences = [
        *_samples(reference, other),
        *_values(reference, other),
        *_ends(reference, other),
    ]
    return min(differences, key=lambda difference: difference.order_key, default=None)


def _samples(reference: Trace, other: Trace) -> Iterator[Difference]:
    for one, many in zip(reference.batches, other.batches, strict=False):
        ours = Counter(sample for batch in one for sample in batch["samples"])
        theirs = Counter(sample for batch in many for sample in batch["samples"])
        step = one[-1]["step"]
        if ours != theirs:
            cause, evidence = _sample_cause(reference, other, ours, theirs)
            yield Difference("samples", step, cause, evidence)
            return
        hashes = _hashes(one)
        others = _hashes(many)
        keys = hashes.keys() & others.keys()
        different = [key for key in keys if hashes[key] != others[key]]
        if different:
            count = len({sample for _, sample in different})
            leaf, sample = min(different)
            text = f"{plural(count, 'sample')} of the same indices have different contents"
            text += f": tensor {leaf} of the batch, sample {sample}"
            yield Difference("inputs", step, Cause.AUGMENTATION.value, [text])
            return


def _sample_cause(
    reference: Trace, other: Trace, ours: Counter[int], theirs: Counter[int]
) -> tuple[str, list[str]]:
    """Return the cause of different samples in one step."""
    total = ours.total()
    other_total = theirs.total()
    evidence = [
        f"{plural(total, 'sample')} on {reference.processes}, "
        f"{plural(other_total, 'sample')} on {other.processes}"
    ]
    if total < sum(len(batch["samples"]) for batch in reference.batches[0]):
        if other_total > total and ours <= theirs:
            evidence.append("the others are padding, which repeats samples")
        return Cause.LAST_BATCH.value, evidence
    if total != other_total:
        if other_total * reference.world.size == total * other.world.size:
            evidence.append(
                "the batch size is one of a process, so the number of processes changes it"
            )
        return GLOBAL_BATCH, evidence
    equal = (ours & theirs).total()
    return Cause.DATA_ORDER.value, [f"{evidence[0]}, of which {equal} are equal"]


def _hashes(batches: list[Event]) -> dict[tuple[int, int], set[int]]:
    result: dict[tuple[int, int], set[int]] = defaultdict(set)
    for batch in batches:
        for leaf, values in enumerate(batch["hashes"]):
            for sample, value in zip(batch["samples"], values, strict=True):
                result[leaf, sample].add(value)
    return result


def _values(reference: Trace, other: Trace) -> Iterator[Difference]:
    """Yield the first difference of parameters, losses, gradients and learning rates."""
    before = 0.0  # largest distance of the step before
    for key in sorted(reference.updates.keys() & other.updates.keys()):
        one = reference.updates[key][0]
        many = other.updates[key]
        step = key[0]
        largest = 0.0
        for quantity, pairs in _quantities(reference, other, one, many[0]).items():
            sizes = [
                abs(a[0] - b[0]) / max(a[0], b[0])
                for a, b in pairs
                if a and b and max(a[0], b[0]) > 0
            ]
            largest = max([largest, *sizes])
            if any(differs(a, b, TOLERANCE) for a, b in pairs):
                evidence = [f"the largest relative distance is {largest:.1e}"]
                cause = Cause.UNKNOWN.value
                if step == 0 and quantity == "parameters":
                    cause = Cause.INITIAL_WEIGHTS.value
                elif before > _DRIFT:
                    cause = Cause.REDUCTION.value
                    text = f"it was {before:.1e} in the step before: rounding, which grows"
                    evidence.append(text)
                elif quantity == "gradients":
                    cause, texts = _gradient_cause(reference, other, one, many)
                    evidence += texts
                yield Difference(quantity, step, cause, evidence)
                return
        if one["rates"] != many[0]["rates"]:
            text = f"{one['rates']} on {reference.processes}"
            text = f"{text}, {many[0]['rates']} on {other.processes}"
            yield Difference("learning rates", step, Cause.LEARNING_RATE.value, [text])
            return
        before = largest


def _quantities(
    reference: Trace, other: Trace, one: Event, many: Event
) -> dict[str, list[tuple[Summary, Summary]]]:
    """Return pairs of summaries. Names of parameters depend on wrappers, their order does not."""
    result = {}
    for quantity, name in (("parameters", "values"), ("gradients", "gradients")):
        result[quantity] = list(zip(one[name].values(), many[name].values(), strict=False))
    # Means over all targets of a step, if both runs have equally many.
    losses = [trace.losses.get(one["step"], []) for trace in (reference, other)]
    counts = [sum(event["count"] for event in events) for events in losses]
    means: list[tuple[Summary, Summary]] = []
    if counts[0] == counts[1] > 0:
        sums = [sum(event["value"] * event["count"] for event in events) for events in losses]
        ours, theirs = (total / counts[0] for total in sums)
        means.append(([ours, ours], [theirs, theirs]))
    return {"parameters": result["parameters"], "loss": means, "gradients": result["gradients"]}


def _gradient_cause(
    reference: Trace, other: Trace, one: Event, many: list[Event]
) -> tuple[str, list[str]]:
    first = many[0]["gradients"]
    if any(differs(first[name], event["gradients"].get(name)) for event in many for name in first):
        return Cause.UNSYNCHRONISED.value, ["the gradients differ between ranks"]
    pairs = zip(one["gradients"].values(), first.values(), strict=False)
    ratios = [theirs[0] / ours[0] for ours, theirs in pairs if ours and theirs and ours[0] > 0]
    factor = other.world.size / reference.world.size
    for expected in (factor, 1 / factor, factor**2, 1 / factor**2):
        is_same = all(abs(ratio / expected - 1) < _SAME_RATIO for ratio in ratios)
        if factor != 1 and ratios and is_same:
            text = f"the gradients are {expected:g} times as long: one sum over processes, or one"
            return Cause.LOSS.value, [f"{text} division, too many"]
    counts = {event["count"] for event in other.losses.get(one["step"], [])}
    if len(counts) > 1:
        text = f"ranks average over {min(counts):,} to {max(counts):,} targets, and their means"
        return Cause.LOSS.value, [f"{text} have equal weights"]
    return Cause.UNKNOWN.value, []


def _ends(reference: Trace, other: Trace) -> Iterator[Difference]:
    runs = f"{{}} on {reference.processes}, {{}} on {other.processes}"
    # Reductions of the samples of an evaluation, each of all ranks.
    counts = (
        zip(*trace.world.events("count").values(), strict=False) for trace in (reference, other)
    )
    for one, many in zip(*counts, strict=False):
        step = one[0]["step"]
        ours = sum(event["samples"] for event in one)
        theirs = sum(event["samples"] for event in many)
        if ours != theirs:
            text = runs.format(f"{ours:,} samples", f"{theirs:,}")
            yield Difference("evaluation", step, Cause.EVALUATION.value, [text])
            break
    if reference.steps != other.steps:
        text = runs.format(reference.steps, other.steps)
        step = min(reference.steps, other.steps)
        yield Difference("number of steps", step, Cause.LAST_BATCH.value, [text])


# --- commands -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramComparison:
    """First difference of one program between two numbers of processes."""

    program: str
    processes: tuple[int, int]  # of the reference, of the command
    steps: int  # observed in both
    difference: Difference | None

    @property
    def is_unknown(self) -> bool:
        """Whether the cause of the difference is unknown."""
        return self.difference is not None and self.difference.cause == Cause.UNKNOWN.value


def reference_command(command: Sequence[str], processes: int) -> list[str]:
    """Return the command with another number of processes.

    Raises:
        InputError: the command does not have exactly one option for the number of processes.
    """
    result = list(command)
    count = 0
    for i, argument in enumerate(command):
        option, _, value = argument.partition("=")
        if option in _OPTIONS:
            count += 1
            if value:
                result[i] = f"{option}={processes}"
            elif i + 1 < len(command):
                result[i + 1] = str(processes)
    if count != 1:
        raise InputError(
            f"--against {processes}: the command has {count} options for the number of processes",
            expected=f"exactly one of {', '.join(_OPTIONS)}",
            fix=f"--against-command '{shlex.join(command)}', with another number of processes",
            code="E_OPTION_CONFLICT",
        )
    return result


def compare_commands(
    reference: Sequence[str], command: Sequence[str], observed: Path, folder: Path, run: Run
) -> tuple[int, list[ProgramComparison]]:
    """Run the reference command, compare, and repeat both commands without parts of the model.

    Return the exit code of the reference command, and a comparison for each program. The folder
    `observed` has the events of the audited command; those of further runs are written to `folder`.
    """
    events = folder / "reference"
    events.mkdir()
    code = run(reference, events, ())
    if code:
        return code, []
    pairs = _pairs(events, observed)
    results = [_compare(*pair) for pair in pairs]
    kinds = {
        event["kind"]
        for pair in pairs
        for trace in pair
        for events_of_rank in trace.world.ranks.values()
        for event in events_of_rank
    }
    parts = [part for part, kind in _PARTS.items() if kind in kinds]
    subsets = [subset for size in range(1, len(parts) + 1) for subset in combinations(parts, size)]
    for number, subset in enumerate(subsets):
        if not any(result.is_unknown for result in results):
            break
        folders = [folder / f"{name}-{number}" for name in ("reference", "command")]
        codes = []
        for one, path in zip((reference, command), folders, strict=True):
            path.mkdir()
            codes.append(run(one, path, subset))
        if not any(codes):
            changed = [_compare(*pair) for pair in _pairs(*folders)]
            results = [_attributed(*pair, subset) for pair in zip(results, changed, strict=True)]
    return 0, results


def _pairs(reference: Path, other: Path) -> list[tuple[Trace, Trace]]:
    """Return the trainings of two commands, in the order of their programs."""
    runs = []
    for folder in (reference, other):
        worlds = [world for world in group_worlds(read_events(folder)) if world.events("update")[0]]
        runs.append([Trace.of(one) for one in sorted(worlds, key=lambda world: world.program)])
    programs = [[trace.world.program for trace in traces] for traces in runs]
    if programs[0] != programs[1]:
        raise InputError(
            f"trainings of {programs[0]} on the other number of processes, and of {programs[1]}",
            expected="the same trainings by both commands",
            fix="audit a command with one training, of which all ranks run on this machine",
            code="E_NOTHING_OBSERVED",
        )
    return list(zip(*runs, strict=True))


def _compare(reference: Trace, other: Trace) -> ProgramComparison:
    sizes = (reference.world.size, other.world.size)
    steps = len(reference.updates.keys() & other.updates.keys())
    return ProgramComparison(other.world.program, sizes, steps, first_difference(reference, other))


def _attributed(
    before: ProgramComparison, after: ProgramComparison, parts: Sequence[str]
) -> ProgramComparison:
    """Return the comparison with its cause, if there is no difference without parts of a model."""
    difference = before.difference
    remaining = after.difference
    if difference is None or not before.is_unknown:
        return before
    end = "nothing differs"
    if remaining is not None:
        if remaining.order_key <= difference.order_key:
            return before
        end = f"first difference in the {remaining.quantity} of step {remaining.step}"
    evidence = [*difference.evidence, f"both run again without {' and '.join(parts)}: {end}"]
    cause = ", ".join(_PART_CAUSES[part] for part in parts)
    return replace(before, difference=replace(difference, cause=cause, evidence=evidence))


def print_comparisons(comparisons: Sequence[ProgramComparison]) -> None:
    """Print the first difference of each program."""
    for one in comparisons:
        runs = f"{one.program}, {one.processes[0]} and {one.processes[1]} processes"
        if one.difference is None:
            print(f"{runs}: equal to rounding in {one.steps} observed steps")
            continue
        place = f"the {one.difference.quantity} of step {one.difference.step}"
        print(f"{runs}: the first difference is in {place}")
        print(f"    cause: {one.difference.cause}")
        for text in one.difference.evidence:
            print(f"    {text}")
