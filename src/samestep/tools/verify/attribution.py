"""Attribution of a difference to a cause, by experiments.

Each experiment repeats both runs with one quantity held constant. The quantity is the cause if the
difference disappears, and is not if the difference remains.
"""

from __future__ import annotations

from typing import Any

from samestep.launcher.failure import Failure
from samestep.tools.verify.causes import Cause, Finding
from samestep.tools.verify.compare import (
    TEXTS,
    Comparison,
    Difference,
    Tolerance,
    compare,
    first_of,
)
from samestep.tools.verify.trials import PLAIN, Note, Record, TrialRunner, described

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
# In float64 rounding is far below, and a mistake far above.
_ROUNDING = 1e-9
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
_EXPERIMENTS = {
    Cause.THREADS: "with one thread per rank",
    Cause.MODEL_RANDOM: "without its random numbers (generators seeded by call, or evaluation mode)",
    Cause.LEARNING_RATE: "with the learning rates of the reference",
    Cause.BATCH_NORM: "with layers of batch statistics in evaluation mode",
}


class Attribution:
    """Experiments on one pair of runs.

    Args:
        runner: runs the experiments.
        reference: the first run.
        other: the run that differs.
        tolerance: of rounding; None for equal bits.
    """

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
        resume = self._check_resume(first)
        if resume is not None:
            return resume
        failure = self._other.failure
        if first is None and failure is not None and failure.code == "E_RANK_BATCH":
            # A loader of Samestep has compared the ranks before the script got the batch.
            alone = self._runner.run(self._many, self._reference, reads_alone=True)
            first = compare(self._reference, alone, self._tolerance).first
            self._other = alone if first is not None else self._other
        if first is None or first.stage in ("steps", "calls"):
            return self._end_of_run(first)
        finding = (
            self._check_repetition(first)
            or self._check_options(first)
            or self._check_rounding(first)
        )
        return finding or self._by_stage(first)

    def _by_stage(self, first: Difference) -> Finding:
        methods = {
            "order": self._order,
            "inputs": self._inputs,
            "targets": self._inputs,
            "arguments": self._arguments,
            "rates": self._learning_rates,
            "settings": self._settings,
            "outputs": self._forward,
            "loss": self._loss,
            "gradients": self._backward,
            **dict.fromkeys(TEXTS, self._printed),
        }
        if first.quantity == "evaluation" and first.stage != "outputs":
            seen = "the evaluation reads or computes other samples"
            return Finding(Cause.EVALUATION, first, (seen, *filter(None, [first.detail])))
        return methods.get(first.stage, self._state)(first)

    def _notes(self, first: Difference) -> tuple[Note, Note]:
        """Return the notes on the step of a difference: of both runs, or of two ranks of the second."""
        notes = [self._note(self._other, first.step, rank) for rank in first.ranks or (0,)]
        if first.ranks is None:
            notes.insert(0, self._note(self._reference, first.step, 0))
        return notes[0], notes[1]

    def _note(self, record: Record, step: int, rank: int) -> Note:
        if step in record.steps:
            return record.steps[step][rank]
        return next(note for note in reversed(record.events[rank]) if note.get("step") == step)

    def _check_resume(self, first: Difference | None) -> Finding | None:
        """Return a finding if the killed and resumed run differs, but the uninterrupted run does not."""
        if not self._other.label:
            return None
        uninterrupted = self._runner.run(self._many, self._reference)
        if compare(self._reference, uninterrupted, self._tolerance).failing:
            return None
        evidence = f"the uninterrupted run of {described(self._many)} equals the reference"
        return Finding(Cause.RESUME, first, (evidence, *_failure_text(self._other.failure)))

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
        return self._unrepeated(repeated)

    def _unrepeated(self, first: Difference) -> Finding:
        """Return the cause of a difference of two runs of the reference."""
        evidence = f"{described(self._one)}, run twice, differ between the runs: {first.location}"
        if first.stage in ("inputs", "targets"):
            finding = self._inputs(first)
            return Finding(finding.cause, first, (evidence, *finding.evidence))
        if first.stage in ("outputs", "loss", "gradients"):
            return self._repeat_in_double(first, evidence)
        if first.stage == "before":
            cause = Cause.INITIAL_WEIGHTS if first.step <= 1 else Cause.UNSYNCHRONISED
            return Finding(
                cause, first, (evidence, "the state is not seeded, or changes between steps")
            )
        cause = _UNSEEDED_CAUSES.get(first.stage, Cause.UNKNOWN)
        return Finding(cause, first, (evidence, "this does not depend on the seed alone"))

    def _repeat_in_double(self, first: Difference, evidence: str) -> Finding:
        """Return the cause of different arithmetic in two equal runs: the order of sums, or random numbers."""
        exact = self._runner.run(self._one, double=True)
        size = _largest_distance(
            compare(exact, self._runner.repeat(exact, double=True), None), first.step
        )
        if size < _ROUNDING:
            rounding = f"in float64 the distance is at most {size:.1e}: rounding, in another order each time"
            return Finding(Cause.KERNEL, first, (evidence, rounding))
        return Finding(
            Cause.MODEL_RANDOM,
            first,
            (evidence, f"in float64 the distance is {size:.1e}: not rounding"),
        )

    def _check_rounding(self, first: Difference) -> Finding | None:
        """Return a finding if equal bits are required of a fast reduction."""
        is_fast = self._tolerance is None and not self._reference.is_exact
        if not is_fast or first.distance is None or first.stage in TEXTS or first.ranks is not None:
            return None
        evidence = f"the distance is {first.distance:.1e}"
        size = float("inf")
        threads = self._threads(first, evidence)
        if threads is None:
            size = self._float64_distance(first)
        if size >= _ROUNDING:
            return threads
        return Finding(Cause.REDUCTION, first, (evidence, _rounding_text(size)))

    def _check_options(self, first: Difference) -> Finding | None:
        """Return a finding if the options of `samestep.parallel` depend on the number of processes."""
        for ours, theirs in zip(self._reference.modules, self._other.modules, strict=False):
            for key, cause in _OPTION_CAUSES.items():
                values = ours["options"].get(key), theirs["options"].get(key)
                if values[0] != values[1] and first.stage in (
                    "outputs",
                    "loss",
                    "gradients",
                    "after",
                ):
                    evidence = f"samestep.parallel has {key}={values[0]!r} and {key}={values[1]!r}"
                    return Finding(cause, first, (evidence,))
        return None

    def _end_of_run(self, first: Difference | None) -> Finding:
        """Return the cause of an early end, or of a different number of steps or calls."""
        failure = self._other.failure
        error = _failure_text(failure)
        is_stuck = any(note["kind"] == "stuck" for notes in self._other.events for note in notes)
        is_other_path = first is not None and first.stage == "calls" and first.ranks is not None
        if is_stuck or is_other_path or (failure is not None and failure.kind in _DESYNC_ERRORS):
            steps = [
                len([note for note in notes if note["kind"] == "step"])
                for notes in self._other.events
            ]
            counts = ", ".join(
                f"rank {rank} made {number} steps" for rank, number in enumerate(steps)
            )
            return Finding(Cause.DIVERGED, first, (counts, *error))
        if failure is not None and _GENERATORS in failure.title:
            return Finding(Cause.MODEL_RANDOM, first, error)
        if failure is not None and failure.code in _FAILURE_CAUSES:
            return Finding(_FAILURE_CAUSES[failure.code], first, error)
        missing = self._reference.steps.get(first.step) if first else None
        if failure is None and first is not None and missing is not None:
            batches = missing[0]["batches"]
            if any(batch["is_last"] for batch in batches):
                evidence = (
                    f"step {first.step}, the last batch of the epoch with {batches[-1]['size']} samples, is present on "
                    f"{described(self._one)} and missing on {described(self._many)}"
                )
                return Finding(Cause.LAST_BATCH, first, (evidence,))
        if failure is not None:
            return Finding(Cause.FAILED, first, error)
        return Finding(
            Cause.DATA_ORDER,
            first,
            (f"{len(self._reference.steps)} and {len(self._other.steps)} steps",),
        )

    def _order(self, first: Difference) -> Finding:
        """Return the cause of different indices: another last batch of the epoch, or another order."""
        assert first.number is not None
        notes = self._notes(first)
        batches = [
            note["batches"][first.number] for note in notes if first.number < len(note["batches"])
        ]
        evidence = (first.detail, *_failure_text(self._other.failure))
        is_last = any(batch["is_last"] for batch in batches) and (first.step, first.number) != (
            1,
            0,
        )
        if is_last and first.ranks is None and len(batches) == 2:
            earlier = "all earlier steps have equal samples; this step has"
            return Finding(Cause.LAST_BATCH, first, (f"{earlier} {first.detail}",))
        return Finding(Cause.DATA_ORDER, first, evidence)

    def _inputs(self, first: Difference) -> Finding:
        """Return the cause of different inputs or targets at equal indices: other samples, or another augmentation."""
        assert first.number is not None
        ours, theirs = (note["batches"][first.number] for note in self._notes(first))
        repeated = self._runner.run(1, repeat_samples=True).folder
        for file, action, kind in (
            ("differing", "read", "samples"),
            ("collated", "collated", "batches"),
        ):
            differing = repeated / f"{file}.txt"
            if differing.exists():
                number = len(set(differing.read_text(encoding="utf-8").split()))
                evidence = (
                    f"{action} twice in one process with equal states of the seeded generators, {number} {kind} differ"
                    ": they depend on another source of random numbers"
                )
                return Finding(Cause.AUGMENTATION, first, (evidence,))
        changed = set(theirs["rows"]) - set(ours["rows"])
        known = {row for notes in self._reference.events for row in _rows(notes)}
        if changed <= known:
            evidence = "indices are equal, but stand for other samples of the dataset"
            return Finding(Cause.DATA_ORDER, first, (evidence,))
        equal = "read twice in one process, samples are equal"
        if ours["targets"] != theirs["targets"]:
            evidence = "targets differ together with inputs: equal indices stand for other samples of the dataset"
            return Finding(Cause.DATA_ORDER, first, (equal, evidence))
        return Finding(
            Cause.AUGMENTATION,
            first,
            (equal, "samples depend on the process or on the time of its start"),
        )

    def _arguments(self, first: Difference) -> Finding:
        """Return the cause of other arguments of a call although batches and earlier calls are equal."""
        seen = "batches of loaders and earlier calls are equal; the script gives other values to the model"
        return Finding(Cause.DATA_ORDER, first, (seen, *_failure_text(self._other.failure)))

    def _learning_rates(self, first: Difference) -> Finding:
        evidence = f"learning rates are {first.detail}"
        rates = tuple(tuple(notes[0]["rates"]) for notes in self._reference.steps.values())
        finding = self._experiment(first, Cause.LEARNING_RATE, (evidence,), learning_rates=rates)
        return finding or Finding(Cause.LEARNING_RATE, first, (evidence,))

    def _settings(self, first: Difference) -> Finding:
        return Finding(Cause.SETTINGS, first, (f"settings of the step differ: {first.detail}",))

    def _forward(self, first: Difference) -> Finding:
        seen = f"arguments and weights are equal; the outputs of call {(first.number or 0) + 1} of {first.module} differ"
        is_local = any(
            note["options"].get("batch_norm") == "local" for note in self._reference.modules
        )
        finding = self._threads(first, seen)
        if finding is None and is_local:
            evidence = (seen, "samestep.parallel has batch_norm='local'")
            finding = self._experiment(first, Cause.BATCH_NORM, evidence, without_norms=True)
        finding = finding or self._experiment(
            first, Cause.MODEL_RANDOM, (seen,), seed_generators=True
        )
        finding = finding or self._experiment(first, Cause.MODEL_RANDOM, (seen,), eval_mode=True)
        return finding or Finding(Cause.UNKNOWN, first, (seen, *self._float64_text(first)))

    def _loss(self, first: Difference) -> Finding:
        seen = "arguments, weights and outputs of all calls are equal, the loss differs"
        finding = self._threads(first, seen)
        return finding or Finding(
            Cause.LOSS, first, (seen, first.detail, *self._float64_text(first))
        )

    def _backward(self, first: Difference) -> Finding:
        seen = "outputs of all calls and losses are equal, the gradient differs"
        finding = self._threads(first, seen) or self._scale(first, seen)
        if finding is not None:
            return finding
        if first.ranks is not None:
            return Finding(
                Cause.UNSYNCHRONISED, first, (seen, "ranks changed it after the backward")
            )
        size = self._float64_distance(first)
        return Finding(
            Cause.REDUCTION if size < _ROUNDING else Cause.UNKNOWN,
            first,
            (seen, _rounding_text(size)),
        )

    def _scale(self, first: Difference, seen: str) -> Finding | None:
        """Return a finding if the gradient is that of the reference times a power of the number of processes."""
        norm, other = (note["norm"] for note in self._notes(first))
        ratio = other / norm if norm else 1.0
        by = self._many / self._one
        for factor in (by, 1 / by, by**2, 1 / by**2):
            if factor != 1 and abs(ratio / factor - 1) < _SAME_RATIO:
                evidence = (
                    f"the gradient is {factor:g} times as long: one summation over processes, or one division by their "
                    "number, too many"
                )
                return Finding(Cause.LOSS, first, (seen, evidence))
        return None

    def _state(self, first: Difference) -> Finding:
        """Return the cause of a state that differs before or after a step with equal gradients."""
        if first.stage == "before" and first.step <= 1:
            return Finding(
                Cause.INITIAL_WEIGHTS, first, ("weights or buffers differ before the first step",)
            )
        if first.stage == "before":
            seen = f"equal after step {first.step - 1}; changed between two steps"
        else:
            seen = "gradients and losses are equal, the state after the step differs"
        kind = "tensor of the optimizer state"
        if first.stage != "optimizer":
            weights = {
                name for notes in self._reference.steps.values() for name in notes[0]["weights"]
            }
            kind = "parameter" if first.tensor in weights else "buffer"
        return Finding(Cause.UNSYNCHRONISED, first, (seen, f"{first.tensor} is a {kind}"))

    def _printed(self, first: Difference) -> Finding:
        evidence = (
            "weights, losses and outputs of all calls are equal, but not what rank 0 prints or writes",
        )
        return Finding(Cause.EVALUATION, first, (*evidence, first.detail))

    def _threads_differ(self, first: Difference) -> str | None:
        if first.stage in TEXTS or not self._note_exists(first):
            return None
        one, other = (note["threads"] for note in self._notes(first))
        if one == other:
            return None
        return f"ranks compute with {one} and {other} threads"

    def _note_exists(self, first: Difference) -> bool:
        return first.step in self._reference.steps and first.step in self._other.steps

    def _threads(self, first: Difference, seen: str) -> Finding | None:
        counts = self._threads_differ(first)
        if counts is None:
            return None
        if self._compare_under(single_thread=True).first is not None:
            return None  # ranks and threads both change the order of sums
        return self._experiment(first, Cause.THREADS, (seen, counts), single_thread=True)

    def _experiment(
        self, first: Difference, cause: Cause, evidence: tuple[str, ...], **changes: Any
    ) -> Finding | None:
        """Return the cause if, under the intervention, the difference disappears or only a later one remains."""
        remaining = self._compare_under(**changes).first
        if remaining is not None and remaining.order_key <= first.order_key:
            return None
        one = described(PLAIN) if self._one == PLAIN else self._one
        runs = f"{one} and {described(self._many)}"
        result = (
            f"{runs} are equal"
            if remaining is None
            else f"{runs} differ later only: {remaining.location}"
        )
        return Finding(cause, first, (*evidence, f"{_EXPERIMENTS[cause]}, {result}"))

    def _compare_under(self, **changes: Any) -> Comparison:
        """Repeat both runs under interventions and compare with the tolerance of the verification."""
        reference = self._runner.run(self._one, **changes)
        measured = self._runner.run(self._many, reference, **changes)
        return compare(reference, measured, self._tolerance)

    def _float64_text(self, first: Difference) -> tuple[str, ...]:
        if self._runner.conditions.interventions.double or first.ranks is not None:
            return ()
        return (_rounding_text(self._float64_distance(first)),)

    def _float64_distance(self, first: Difference) -> float:
        """Return the largest distance in float64 up to a step; infinity if the subject does not run in it."""
        reference = self._runner.run(self._one, double=True)
        measured = self._runner.run(self._many, reference, double=True)
        if measured.failure is not None or not measured.steps:
            return float("inf")
        return _largest_distance(compare(reference, measured, None), first.step)


def _rows(notes: tuple[Note, ...]) -> set[str]:
    return {row for note in notes for batch in note.get("batches", ()) for row in batch["rows"]}


def _failure_text(failure: Failure | None) -> tuple[str, ...]:
    """Return the error without expectation and fix, since a finding has its own fix."""
    text = failure.text.removeprefix("error: ").partition("\n  expected: ")[0] if failure else ""
    if text:
        return (text,)
    return ()


def _rounding_text(size: float) -> str:
    return f"in float64 the distance is {size:.1e}: {'rounding' if size < _ROUNDING else 'not rounding'}"


def _largest_distance(comparison: Comparison, step: int) -> float:
    """Return the largest distance up to a step; infinity if something differs that has no distance."""
    sizes = [d.distance for d in comparison.differences if d.step <= step and d.stage != "before"]
    return max((float("inf") if size is None else size for size in sizes), default=0.0)
