"""Attribution of a difference to a cause, by experiments.

Each experiment repeats both runs with one quantity held constant. The quantity is the cause if the
difference disappears, and is not if the difference remains.
"""

from __future__ import annotations

import math
from typing import Any

from samestep.tools.verify.causes import Cause, Finding
from samestep.tools.verify.compare import (
    ROUNDING,
    TEXTS,
    Comparison,
    Difference,
    Tolerance,
    compare,
    first_of,
)
from samestep.tools.verify.trials import Note, Record, TrialRunner, described

# Errors of a rank that performs other operations than the others.
_DESYNC_ERRORS = ("RankDesyncError", "PeerLostError")
_FAILURE_CAUSES = {
    "E_RANK_BATCH": Cause.DATA_ORDER,
    "E_RANK_SETTINGS": Cause.SETTINGS,
    "E_RANK_MISMATCH": Cause.UNSYNCHRONISED,
    "E_RANK_DESYNC": Cause.DIVERGED,
}
_OPTION_CAUSES = {
    "microbatches": Cause.MICROBATCHES,
    "batch_norm": Cause.BATCH_NORM,
    "reduction": Cause.REDUCTION,
}
# Part of the report of a failure that differs between ranks, for differences that no note shows.
_GENERATORS = "random generators"
# Rounding of a norm in float32 is far below, and any two of the compared factors are far apart.
_SAME_RATIO = 1e-4
# Causes of a difference between two equal runs, in quantities that are computed from the seed
# without arithmetic.
_UNSEEDED_CAUSES = {
    "order": Cause.DATA_ORDER,
    "arguments": Cause.DATA_ORDER,
    "rates": Cause.LEARNING_RATE,
    "settings": Cause.SETTINGS,
}
# Stages of which the first difference names the cause without an experiment, and the evidence.
_PRINTED = (
    "weights, losses and outputs of all calls are equal, but not what rank 0 prints or writes"
)
_OBVIOUS_CAUSES = {
    "arguments": (
        Cause.DATA_ORDER,
        "batches of loaders and earlier calls are equal; the script gives other values to the "
        "model",
    ),
    "settings": (Cause.SETTINGS, "settings of the step differ"),
    **dict.fromkeys(TEXTS, (Cause.EVALUATION, _PRINTED)),
}
_EXPERIMENTS = {
    Cause.THREADS: "with one thread per rank",
    Cause.MODEL_RANDOM: "without its random numbers (generators seeded by call, or evaluation "
    "mode)",
    Cause.LEARNING_RATE: "with the learning rates of the reference",
    Cause.BATCH_NORM: "with layers of batch statistics in evaluation mode",
}


class Attribution:
    """Experiments on a run that differs from a reference; without a tolerance, in any bit."""

    def __init__(
        self, runner: TrialRunner, reference: Record, other: Record, tolerance: Tolerance | None
    ) -> None:
        self._runner = runner
        self._reference = reference
        self._other = other
        self._one = reference.processes
        self._many = other.processes
        self._tolerance = tolerance

    def find(self, first: Difference | None) -> Finding:
        """Return the cause of the first difference; None stands for a failure before one."""
        if self._other.label:
            uninterrupted = self._runner.run(self._many, self._reference)
            if compare(self._reference, uninterrupted, self._tolerance).holds:
                seen = f"the uninterrupted run of {described(self._many)} equals the reference"
                return Finding(Cause.RESUME, first, (seen, *self._failure_text()))
        failure = self._other.failure
        if first is None and failure is not None and failure.code == "E_RANK_BATCH":
            # A loader of Samestep has compared the ranks before the script got the batch.
            alone = self._runner.run(self._many, self._reference, reads_alone=True)
            first = compare(self._reference, alone, self._tolerance).first
            if first is not None:
                self._other = alone
        if first is None or first.stage in ("steps", "calls"):
            return self._end_of_run(first)
        # Repetition first: every experiment needs runs that repeat.
        return (
            self._check_repetition(first)
            or self._check_options(first)
            or self._check_rounding(first)
            or self._by_stage(first)
        )

    def _by_stage(self, first: Difference) -> Finding:
        if first.quantity == "evaluation" and first.stage != "outputs":
            seen = "the evaluation reads or computes other samples"
            return Finding(Cause.EVALUATION, first, (seen, *filter(None, [first.detail])))
        if first.stage in _OBVIOUS_CAUSES:
            cause, seen = _OBVIOUS_CAUSES[first.stage]
            detail = filter(None, [first.detail])
            return Finding(cause, first, (seen, *detail, *self._failure_text()))
        methods = {
            "order": self._order,
            "inputs": self._inputs,
            "targets": self._inputs,
            "rates": self._learning_rates,
            "outputs": self._forward,
            "loss": self._loss,
            "gradients": self._backward,
        }
        return methods.get(first.stage, self._state)(first)

    def _notes(self, first: Difference) -> tuple[Note, Note]:
        """Return the notes on a step of both runs, or of two ranks of the second."""
        sources = [(self._reference, 0), (self._other, 0)]
        if first.ranks is not None:
            sources = [(self._other, rank) for rank in first.ranks]
        notes = []
        for record, rank in sources:
            if first.step in record.steps:
                notes.append(record.steps[first.step][rank])
            else:  # the step was not finished
                events = reversed(record.events[rank])
                notes.append(next(note for note in events if note.get("step") == first.step))
        return notes[0], notes[1]

    # --- causes that any stage can have ---------------------------------------------------------

    def _check_repetition(self, first: Difference) -> Finding | None:
        """Return a finding if two runs of the reference differ."""
        if first.stage in TEXTS:
            return None  # compared with a repeated run already
        second = self._runner.repeat(self._reference)
        # Ranks are compared by bits, and so are their repetitions.
        tolerance = None if first.ranks is not None else self._tolerance
        failing = compare(self._reference, second, tolerance).failing
        repeated = first_of([difference for difference in failing if difference.ranks is None])
        if repeated is None:
            return None
        evidence = f"{described(self._one)}, run twice, differ between the runs"
        evidence = f"{evidence}: {repeated.location}"
        if repeated.stage in ("inputs", "targets"):
            between = Attribution(self._runner, self._reference, second, tolerance)
            finding = between._inputs(repeated)
            return Finding(finding.cause, repeated, (evidence, *finding.evidence))
        if repeated.stage in ("outputs", "loss", "gradients"):
            exact = self._runner.run(self._one, double=True)
            again = self._runner.repeat(exact, double=True)
            size = _largest_distance(compare(exact, again, None), repeated.step)
            # Rounding differs because the order of sums does; anything larger, random numbers.
            cause = Cause.MODEL_RANDOM
            if size < ROUNDING:
                cause = Cause.KERNEL
            return Finding(cause, repeated, (evidence, _rounding_text(size)))
        cause = _UNSEEDED_CAUSES.get(repeated.stage, Cause.UNKNOWN)
        seen = "this does not depend on the seed alone"
        if repeated.stage == "before":
            seen = "the state is not seeded, or changes between steps"
            cause = Cause.UNSYNCHRONISED
            if repeated.step <= 1:
                cause = Cause.INITIAL_WEIGHTS
        return Finding(cause, repeated, (evidence, seen))

    def _check_options(self, first: Difference) -> Finding | None:
        """Return a finding if options of `samestep.parallel` depend on the number of processes."""
        if first.stage not in ("outputs", "loss", "gradients", "after"):
            return None
        for ours, theirs in zip(self._reference.modules, self._other.modules, strict=False):
            for key, cause in _OPTION_CAUSES.items():
                one = ours["options"].get(key)
                other = theirs["options"].get(key)
                if one != other:
                    evidence = f"samestep.parallel has {key}={one!r} and {key}={other!r}"
                    return Finding(cause, first, (evidence,))
        return None

    def _check_rounding(self, first: Difference) -> Finding | None:
        """Return a finding if equal bits are required of a fast reduction."""
        is_fast = self._tolerance is None and not self._reference.is_exact
        if not is_fast or first.distance is None or first.stage in TEXTS or first.ranks is not None:
            return None
        evidence = f"the distance is {first.distance:.1e}"
        threads = self._threads(first, evidence)
        if threads is not None:
            return threads
        size = self._float64_distance(first)
        if size >= ROUNDING:
            return None
        return Finding(Cause.REDUCTION, first, (evidence, _rounding_text(size)))

    def _end_of_run(self, first: Difference | None) -> Finding:
        """Return the cause of an early end, or of a different number of steps or calls."""
        failure = self._other.failure
        error = self._failure_text()
        is_stuck = failure is not None and failure.code == "E_HANG"
        is_other_path = first is not None and first.stage == "calls" and first.ranks is not None
        if is_stuck or is_other_path or (failure is not None and failure.kind in _DESYNC_ERRORS):
            ranks = range(len(self._other.events))
            counts = (
                f"rank {rank} made {len(self._other.notes('step', rank))} steps" for rank in ranks
            )
            return Finding(Cause.DIVERGED, first, (", ".join(counts), *error))
        if failure is not None:
            cause = _FAILURE_CAUSES.get(failure.code or "", Cause.FAILED)
            if _GENERATORS in failure.title:
                cause = Cause.MODEL_RANDOM
            return Finding(cause, first, error)
        missing = self._reference.steps.get(first.step) if first else None
        if first is not None and missing is not None:
            batches = missing[0]["batches"]
            if any(batch["is_last"] for batch in batches):
                evidence = (
                    f"step {first.step}, the last batch of the epoch with {batches[-1]['size']} "
                    f"samples, is present on {described(self._one)} and missing on "
                    f"{described(self._many)}"
                )
                return Finding(Cause.LAST_BATCH, first, (evidence,))
        counts_text = f"{len(self._reference.steps)} and {len(self._other.steps)} steps"
        return Finding(Cause.DATA_ORDER, first, (counts_text,))

    # --- causes by the stage of the first difference --------------------------------------------

    def _order(self, first: Difference) -> Finding:
        """Return the cause of different indices: another last batch of the epoch, or order."""
        number = first.number
        assert number is not None
        notes = self._notes(first)
        batches = [note["batches"][number] for note in notes if number < len(note["batches"])]
        is_first = first.step == 1 and number == 0
        is_last = any(batch["is_last"] for batch in batches) and not is_first
        if is_last and first.ranks is None and len(batches) == 2:
            seen = f"all earlier steps have equal samples; this step has {first.detail}"
            return Finding(Cause.LAST_BATCH, first, (seen,))
        return Finding(Cause.DATA_ORDER, first, (first.detail, *self._failure_text()))

    def _inputs(self, first: Difference) -> Finding:
        """Return the cause of different batches at equal indices: samples, or augmentation."""
        assert first.number is not None
        ours, theirs = (note["batches"][first.number] for note in self._notes(first))
        repeated = self._runner.run(1, repeat_samples=True).folder
        for action, kind, name in (
            ("read", "samples", "differing.txt"),
            ("collated", "batches", "collated.txt"),
        ):
            file = repeated / name
            if file.exists():
                # A set: samples are read in several epochs.
                number = len(set(file.read_text(encoding="utf-8").split()))
                evidence = (
                    f"{action} twice in one process with equal states of the seeded generators, "
                    f"{number} {kind} differ: they depend on another source of random numbers"
                )
                return Finding(Cause.AUGMENTATION, first, (evidence,))
        known = {
            row
            for notes in self._reference.events
            for note in notes
            for batch in note.get("batches", ())
            for row in batch["rows"]
        }
        if set(theirs["rows"]) - set(ours["rows"]) <= known:
            evidence = "indices are equal, but stand for other samples of the dataset"
            return Finding(Cause.DATA_ORDER, first, (evidence,))
        equal = "read twice in one process, samples are equal"
        if ours["targets"] != theirs["targets"]:
            evidence = (
                "targets differ together with inputs: equal indices stand for other samples of the "
                "dataset"
            )
            return Finding(Cause.DATA_ORDER, first, (equal, evidence))
        evidence = "samples depend on the process or on the time of its start"
        return Finding(Cause.AUGMENTATION, first, (equal, evidence))

    def _learning_rates(self, first: Difference) -> Finding:
        evidence = f"learning rates are {first.detail}"
        rates = tuple(tuple(notes[0]["rates"]) for notes in self._reference.steps.values())
        finding = self._experiment(first, Cause.LEARNING_RATE, (evidence,), learning_rates=rates)
        return finding or Finding(Cause.LEARNING_RATE, first, (evidence,))

    def _forward(self, first: Difference) -> Finding:
        call = f"call {(first.number or 0) + 1} of {first.module}"
        seen = f"arguments and weights are equal; the outputs of {call} differ"
        options = [note["options"] for note in self._reference.modules]
        finding = self._threads(first, seen)
        if finding is None and any(option.get("batch_norm") == "local" for option in options):
            evidence = (seen, "samestep.parallel has batch_norm='local'")
            finding = self._experiment(first, Cause.BATCH_NORM, evidence, without_norms=True)
        return (
            finding
            or self._experiment(first, Cause.MODEL_RANDOM, (seen,), seed_generators=True)
            or self._experiment(first, Cause.MODEL_RANDOM, (seen,), eval_mode=True)
            or Finding(Cause.UNKNOWN, first, (seen, *self._float64_text(first)))
        )

    def _loss(self, first: Difference) -> Finding:
        seen = "arguments, weights and outputs of all calls are equal, the loss differs"
        finding = self._threads(first, seen)
        if finding is not None:
            return finding
        return Finding(Cause.LOSS, first, (seen, first.detail, *self._float64_text(first)))

    def _backward(self, first: Difference) -> Finding:
        seen = "outputs of all calls and losses are equal, the gradient differs"
        finding = self._threads(first, seen) or self._scale(first, seen)
        if finding is not None:
            return finding
        if first.ranks is not None:
            evidence = (seen, "ranks changed it after the backward")
            return Finding(Cause.UNSYNCHRONISED, first, evidence)
        size = self._float64_distance(first)
        cause = Cause.UNKNOWN
        if size < ROUNDING:
            cause = Cause.REDUCTION
        return Finding(cause, first, (seen, _rounding_text(size)))

    def _scale(self, first: Difference, seen: str) -> Finding | None:
        """Return a finding if the gradient is too long by a power of the number of processes."""
        norm, other = (note["norm"] for note in self._notes(first))
        by = self._many / (self._one or 1)  # plain Python is one process
        for factor in (by, 1 / by, by**2, 1 / by**2):
            if norm and factor != 1 and abs(other / norm / factor - 1) < _SAME_RATIO:
                evidence = (
                    f"the gradient is {factor:g} times as long: one summation over processes, or "
                    "one division by their number, too many"
                )
                return Finding(Cause.LOSS, first, (seen, evidence))
        return None

    def _state(self, first: Difference) -> Finding:
        """Return the cause of a state that differs before or after a step with equal gradients."""
        if first.stage == "before" and first.step <= 1:
            evidence = "weights or buffers differ before the first step"
            return Finding(Cause.INITIAL_WEIGHTS, first, (evidence,))
        seen = "gradients and losses are equal, the state after the step differs"
        if first.stage == "before":
            seen = f"equal after step {first.step - 1}; changed between two steps"
        steps = self._reference.steps.values()
        kind = "buffer"
        if first.stage == "optimizer":
            kind = "tensor of the optimizer state"
        elif any(first.tensor in notes[0]["weights"] for notes in steps):
            kind = "parameter"
        return Finding(Cause.UNSYNCHRONISED, first, (seen, f"{first.tensor} is a {kind}"))

    # --- experiments ----------------------------------------------------------------------------

    def _threads(self, first: Difference, seen: str) -> Finding | None:
        """Return a finding if ranks compute with different numbers of threads, to effect."""
        if first.step not in self._reference.steps or first.step not in self._other.steps:
            return None
        one, other = (note["threads"] for note in self._notes(first))
        if one == other:
            return None
        if not compare(*self._run_both(single_thread=True), self._tolerance).holds:
            return None  # ranks and threads both change the order of sums
        counts = f"ranks compute with {one} and {other} threads"
        return self._experiment(first, Cause.THREADS, (seen, counts), single_thread=True)

    def _experiment(
        self, first: Difference, cause: Cause, evidence: tuple[str, ...], **changes: Any
    ) -> Finding | None:
        """Return the cause if the difference disappears, or only a later one remains."""
        reference, measured = self._run_both(**changes)
        changed = compare(reference, measured, self._tolerance)
        # A comparison of the ranks can end the run after the call.
        reached = reference.failure is None and _has_made_call(measured, first)
        remaining = changed.first
        is_later = remaining is None or remaining.order_key > first.order_key
        if not is_later or (changed.has_failed and not reached):
            return None
        result = "are equal"
        if remaining is not None:
            result = f"differ later only: {remaining.location}"
        one = self._one or described(self._one)
        runs = f"{one} and {described(self._many)}"
        return Finding(cause, first, (*evidence, f"{_EXPERIMENTS[cause]}, {runs} {result}"))

    def _run_both(self, **changes: Any) -> tuple[Record, Record]:
        """Repeat both runs under interventions."""
        reference = self._runner.run(self._one, **changes)
        return reference, self._runner.run(self._many, reference, **changes)

    def _float64_text(self, first: Difference) -> tuple[str, ...]:
        if self._runner.conditions.interventions.double or first.ranks is not None:
            return ()
        return (_rounding_text(self._float64_distance(first)),)

    def _float64_distance(self, first: Difference) -> float:
        """Return the largest distance in float64 up to a step; infinity if it cannot run."""
        reference, measured = self._run_both(double=True)
        return _largest_distance(compare(reference, measured, None), first.step)

    def _failure_text(self) -> tuple[str, ...]:
        """Return the error without expectation and fix, since a finding has its own fix."""
        if self._other.failure is None:
            return ()
        text = self._other.failure.text.removeprefix("error: ").partition("\n  expected: ")[0]
        return tuple(filter(None, [text]))


def _has_made_call(record: Record, first: Difference) -> bool:
    """Return whether every rank made the call whose outputs differed."""
    return first.stage == "outputs" and all(
        any(
            note.get("step") == first.step and len(note.get("calls", ())) > (first.number or 0)
            for note in notes
        )
        for notes in record.events
    )


def _rounding_text(size: float) -> str:
    if not math.isfinite(size):
        return "in float64 the runs have no values to compare"
    kind = "rounding" if size < ROUNDING else "not rounding"
    return f"in float64 the distance is {size:.1e}: {kind}"


def _largest_distance(comparison: Comparison, step: int) -> float:
    """Return the largest distance up to a step; infinity if it is unknown."""
    if comparison.has_failed:
        return float("inf")
    sizes = [d.distance for d in comparison.differences if d.step <= step and d.stage != "before"]
    if None in sizes:
        return float("inf")
    return max((size for size in sizes if size is not None), default=0.0)
