"""`samestep audit --against`: a training on two numbers of processes compared, and experiments that find a cause."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from samestep.errors import InputError
from samestep.tools.audit.events import read_events
from samestep.tools.audit.findings import batches_per_update, differs
from samestep.tools.audit.worlds import Event, World, group_worlds, matching_passes
from samestep.tools.verify.causes import Cause
from samestep.units import plural

TOLERANCE = 1e-3  # relative, of norms and losses; ranks add in another order
_DRIFT = TOLERANCE / 20  # a distance of the step before that shows growing rounding
_SAME_RATIO = 1e-3
_STAGES = (
    "parameters",
    "samples",
    "inputs",
    "loss",
    "gradients",
    "learning rates",
    "evaluation",
    "number of steps",
)
GLOBAL_BATCH = "global batch size"
# Options of torchrun and of accelerate launch.
_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")
# Parts of a model that an experiment turns off, with the event that shows them.
_PARTS = {"dropout": "dropout", "batch norm": "batch_norm"}
_PART_CAUSES = {"dropout": Cause.MODEL_RANDOM.value, "batch norm": Cause.BATCH_NORM.value}

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
    batches: list[list[Event]] = field(
        default_factory=list
    )  # for each optimizer step, of all ranks
    losses: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    updates: dict[tuple[int, int], list[Event]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, world: World) -> Trace:
        """Collect the samples, losses and updates of each step."""
        trace = cls(world)
        size = max(1, round(batches_per_update(world)))
        for group in matching_passes(world):
            if all(one.trains for one in group.values()):
                length = max(len(one.batches) for one in group.values())
                for start in range(0, length, size):
                    batches = [
                        batch
                        for one in group.values()
                        for batch in one.batches[start : start + size]
                    ]
                    trace.batches.append(batches)
        for rank in range(world.size):
            for event in world.ranks[rank]:
                if event["kind"] == "loss":
                    trace.losses[event["step"]].append(event)
                elif event["kind"] == "update":
                    trace.updates[event["step"], event["optimizer"]].append(event)
        return trace

    def has(self, kind: str) -> bool:
        """Whether a kind of event was observed."""
        return any(
            event["kind"] == kind for events in self.world.ranks.values() for event in events
        )

    @property
    def steps(self) -> int:
        """Number of optimizer steps of rank 0."""
        return 1 + max(step for step, _ in self.updates)


def first_difference(reference: Trace, other: Trace) -> Difference | None:
    """Return the first quantity that differs between two trainings."""
    differences = [
        *_samples(reference, other),
        *_values(reference, other),
        *_ends(reference, other),
    ]
    return min(differences, key=lambda difference: difference.order_key, default=None)


def _samples(reference: Trace, other: Trace) -> Iterator[Difference]:
    size = sum(len(batch["samples"]) for batch in reference.batches[0]) if reference.batches else 0
    for one, many in zip(reference.batches, other.batches, strict=False):
        ours, theirs = (
            Counter(sample for batch in batches for sample in batch["samples"])
            for batches in (one, many)
        )
        step = one[-1]["step"]
        if ours != theirs:
            yield Difference("samples", step, *_sample_cause(reference, other, ours, theirs, size))
            return
        ours_hashes = _hashes(one)
        theirs_hashes = _hashes(many)
        different = [
            key
            for key in ours_hashes.keys() & theirs_hashes.keys()
            if ours_hashes[key] != theirs_hashes[key]
        ]
        if different:
            count = len({sample for _, sample in different})
            leaf, sample = min(different)
            text = f"{plural(count, 'sample')} of the same indices have different contents"
            text += f": tensor {leaf} of the batch, sample {sample}"
            yield Difference("inputs", step, Cause.AUGMENTATION.value, [text])
            return


def _sample_cause(
    reference: Trace, other: Trace, ours: Counter[int], theirs: Counter[int], size: int
) -> tuple[str, list[str]]:
    """Return the cause of different samples in one step; `size` is that of a full batch of the reference."""
    runs = [_processes(trace) for trace in (reference, other)]
    sizes = f"{plural(ours.total(), 'sample')} on {runs[0]}, {plural(theirs.total(), 'sample')} on {runs[1]}"
    if ours.total() < size:
        is_padded = theirs.total() > ours.total() and ours <= theirs
        rule = ["the others are padding, which repeats samples"] if is_padded else []
        return Cause.LAST_BATCH.value, [sizes, *rule]
    if ours.total() != theirs.total():
        is_product = theirs.total() * reference.world.size == ours.total() * other.world.size
        rule = (
            ["the batch size is one of a process, so the number of processes changes it"]
            if is_product
            else []
        )
        return GLOBAL_BATCH, [sizes, *rule]
    return Cause.DATA_ORDER.value, [f"{sizes}, of which {(ours & theirs).total()} are equal"]


def _hashes(batches: list[Event]) -> dict[tuple[int, int], set[int]]:
    """Return hashes of contents by tensor and sample."""
    result: dict[tuple[int, int], set[int]] = defaultdict(set)
    for batch in batches:
        for leaf, values in enumerate(batch["hashes"]):
            for sample, value in zip(batch["samples"], values, strict=True):
                result[leaf, sample].add(value)
    return result


def _values(reference: Trace, other: Trace) -> Iterator[Difference]:
    """Yield the first difference of parameters, losses, gradients and learning rates in each observed step."""
    before = 0.0  # largest distance of the step before
    for key in sorted(reference.updates.keys() & other.updates.keys()):
        one = reference.updates[key]
        many = other.updates[key]
        step = key[0]
        distances = [0.0]
        for quantity, (ours, theirs) in _quantities(reference, other, one[0], many[0]).items():
            distances += [
                abs(a[0] - b[0]) / max(a[0], b[0])
                for a, b in zip(ours, theirs, strict=False)
                if _both(a, b)
            ]
            if any(differs(a, b, TOLERANCE) for a, b in zip(ours, theirs, strict=False)):
                evidence = [f"the largest relative distance is {max(distances):.1e}"]
                cause = Cause.UNKNOWN.value
                if step == 0 and quantity == "parameters":
                    cause = Cause.INITIAL_WEIGHTS.value
                elif before > _DRIFT:
                    evidence.append(
                        f"it was {before:.1e} in the step before: rounding, which grows"
                    )
                    cause = Cause.REDUCTION.value
                elif quantity == "gradients":
                    cause, texts = _gradient_cause(reference, other, step, many)
                    evidence += texts
                yield Difference(quantity, step, cause, evidence)
                return
        if one[0]["rates"] != many[0]["rates"]:
            text = f"{one[0]['rates']} on {_processes(reference)}, {many[0]['rates']} on {_processes(other)}"
            yield Difference("learning rates", step, Cause.LEARNING_RATE.value, [text])
            return
        before = max(distances)


def _quantities(
    reference: Trace, other: Trace, one: Event, many: Event
) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return summaries in both runs. Names of parameters depend on wrappers, their order does not."""
    losses = [_mean_loss(trace.losses.get(one["step"], [])) for trace in (reference, other)]
    is_same = losses[0] is not None and losses[1] is not None and losses[0][1] == losses[1][1]
    pairs = [[[loss[0], loss[0]]] if is_same and loss is not None else [] for loss in losses]
    return {
        "parameters": ([*one["values"].values()], [*many["values"].values()]),
        "loss": (pairs[0], pairs[1]),
        "gradients": ([*one["gradients"].values()], [*many["gradients"].values()]),
    }


def _mean_loss(events: list[Event]) -> tuple[float, int] | None:
    """Return the mean loss over all targets of a step, and their number."""
    count = sum(event["count"] for event in events)
    if count:
        return (sum(event["value"] * event["count"] for event in events) / count, count)
    return None


def _both(first: list[float] | None, second: list[float] | None) -> bool:
    return first is not None and second is not None and max(first[0], second[0]) > 0


def _gradient_cause(
    reference: Trace, other: Trace, step: int, many: list[Event]
) -> tuple[str, list[str]]:
    first = many[0]["gradients"]
    if any(differs(first[name], event["gradients"].get(name)) for event in many for name in first):
        return Cause.UNSYNCHRONISED.value, ["the gradients differ between ranks"]
    pairs = zip(
        reference.updates[step, many[0]["optimizer"]][0]["gradients"].values(),
        first.values(),
        strict=False,
    )
    ratios = [theirs[0] / ours[0] for ours, theirs in pairs if _both(ours, theirs) and ours[0] > 0]
    factor = other.world.size / reference.world.size
    for expected in (factor, 1 / factor, factor**2, 1 / factor**2):
        if (
            factor != 1
            and ratios
            and all(abs(ratio / expected - 1) < _SAME_RATIO for ratio in ratios)
        ):
            text = f"the gradients are {expected:g} times as long: one sum over processes, or one division, too many"
            return Cause.LOSS.value, [text]
    counts = {event["count"] for event in other.losses.get(step, [])}
    if len(counts) > 1:
        text = f"ranks average over {min(counts):,} to {max(counts):,} targets, and their means have equal weights"
        return Cause.LOSS.value, [text]
    return Cause.UNKNOWN.value, []


def _ends(reference: Trace, other: Trace) -> Iterator[Difference]:
    counts = [_evaluation_counts(trace.world) for trace in (reference, other)]
    for (step, ours), (_, theirs) in zip(*counts, strict=False):
        if ours != theirs:
            text = f"{ours:,} samples on {_processes(reference)}, {theirs:,} on {_processes(other)}"
            yield Difference("evaluation", step, Cause.EVALUATION.value, [text])
            break
    if reference.steps != other.steps:
        text = f"{reference.steps} on {_processes(reference)}, {other.steps} on {_processes(other)}"
        yield Difference(
            "number of steps", min(reference.steps, other.steps), Cause.LAST_BATCH.value, [text]
        )


def _evaluation_counts(world: World) -> list[tuple[int, int]]:
    """Return step and total of each reduction of the samples of an evaluation."""
    events = world.events("count")
    return [
        (each[0]["step"], sum(event["samples"] for event in each))
        for each in zip(*events.values(), strict=False)
    ]


def _processes(trace: Trace) -> str:
    return f"{trace.world.size} process{'' if trace.world.size == 1 else 'es'}"


@dataclass(frozen=True)
class ProgramComparison:
    """First difference of one program between two numbers of processes."""

    program: str
    processes: tuple[int, int]  # of the reference, of the command
    steps: int  # observed in both
    difference: Difference | None


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
    """Run the reference command, compare it with the observed one, and repeat both without parts of the model.

    Args:
        reference: command on the other number of processes.
        command: the audited command.
        observed: folder with the events of the audited command.
        folder: folder for the events of the further runs.
        run: function of command, folder and parts to turn off; returns the exit code.

    Returns:
        The exit code of the first command that failed, or 0, and a comparison for each program.
    """
    events = _new(folder / "reference")
    code = run(reference, events, ())
    if code:
        return code, []
    pairs = _pairs(_traces(events), _traces(observed))
    results = [_compare(*pair) for pair in pairs]
    parts = [
        part
        for part, kind in _PARTS.items()
        if any(trace.has(kind) for pair in pairs for trace in pair)
    ]
    subsets = [subset for size in range(1, len(parts) + 1) for subset in combinations(parts, size)]
    for number, subset in enumerate(subsets):
        if not any(map(_needs_experiment, results)):
            break
        folders = [_new(folder / f"{name}-{number}") for name in ("reference", "command")]
        codes = [
            run(one, path, subset) for one, path in zip((reference, command), folders, strict=True)
        ]
        if not any(codes):
            changed = [_compare(*pair) for pair in _pairs(*map(_traces, folders))]
            results = [_attributed(*pair, subset) for pair in zip(results, changed, strict=True)]
    return 0, results


def print_comparisons(comparisons: Sequence[ProgramComparison]) -> None:
    """Print the first difference of each program."""
    for one in comparisons:
        runs = f"{one.program}, {one.processes[0]} and {one.processes[1]} processes"
        if one.difference is None:
            print(f"{runs}: equal to rounding in {one.steps} observed steps")
            continue
        print(
            f"{runs}: the first difference is in the {one.difference.quantity} of step {one.difference.step}"
        )
        print(f"    cause: {one.difference.cause}")
        for text in one.difference.evidence:
            print(f"    {text}")


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _traces(folder: Path) -> list[Trace]:
    """Return the trainings of a command, in the order of their programs."""
    worlds = [world for world in group_worlds(read_events(folder)) if world.events("update")[0]]
    return [Trace.of(world) for world in sorted(worlds, key=lambda world: world.program)]


def _pairs(references: list[Trace], others: list[Trace]) -> list[tuple[Trace, Trace]]:
    programs = [[trace.world.program for trace in traces] for traces in (references, others)]
    if programs[0] != programs[1]:
        raise InputError(
            f"trainings of {programs[0]} on the other number of processes, and of {programs[1]}",
            expected="the same trainings by both commands",
            fix="audit a command with one training, of which all ranks run on this machine",
            code="E_NOTHING_OBSERVED",
        )
    return list(zip(references, others, strict=True))


def _compare(reference: Trace, other: Trace) -> ProgramComparison:
    sizes = (reference.world.size, other.world.size)
    steps = len(reference.updates.keys() & other.updates.keys())
    return ProgramComparison(other.world.program, sizes, steps, first_difference(reference, other))


def _needs_experiment(comparison: ProgramComparison) -> bool:
    difference = comparison.difference
    return difference is not None and difference.cause == Cause.UNKNOWN.value


def _attributed(
    before: ProgramComparison, after: ProgramComparison, parts: Sequence[str]
) -> ProgramComparison:
    """Return the comparison with its cause, if the difference disappears without parts of the model."""
    if before.difference is None or not _needs_experiment(before):
        return before
    remaining = after.difference
    if remaining is not None and remaining.order_key <= before.difference.order_key:
        return before
    end = (
        "nothing differs"
        if remaining is None
        else f"first difference in the {remaining.quantity} of step {remaining.step}"
    )
    text = f"both run again without {' and '.join(parts)}: {end}"
    cause = ", ".join(_PART_CAUSES[part] for part in parts)
    return replace(
        before,
        difference=replace(
            before.difference, cause=cause, evidence=[*before.difference.evidence, text]
        ),
    )
