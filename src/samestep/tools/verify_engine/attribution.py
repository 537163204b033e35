"""Attribution of a difference to a cause, by experiments.

Each experiment repeats both runs with one quantity held constant. The quantity is the cause if the difference
disappears, and is not if the difference remains.
"""

from __future__ import annotations

from typing import Any

from samestep.launcher.failure import Failure
from samestep.tools.verify_engine.causes import Cause, Finding, repeatability_finding
from samestep.tools.verify_engine.compare import Comparison, Difference, compare, first_of
from samestep.tools.verify_engine.trials import Record, StepRecord, TrialRunner
from samestep.units import plural

# Errors of a rank that performs other operations than the others.
_DESYNC_ERRORS = ("RankDesyncError", "PeerLostError")
_RANK_CAUSES = {
    "E_RANK_BATCH": Cause.DATA_ORDER,
    "E_RANK_SETTINGS": Cause.SETTINGS,
    "E_RANK_MISMATCH": Cause.INITIAL_WEIGHTS,  # before the first step: later ones are recorded
}
# In float64 rounding is far below, and a mistake far above.
_ROUNDING = 1e-9
# Rounding of a norm in float32 is far below, and any two of the compared factors are far apart.
_SAME_RATIO = 1e-4
# Stages in which a differing setting of the engine can appear first.
_AFTER_INPUTS = ("outputs", "loss", "gradients", "after", "optimizer")
_CONFIG_STAGES = {"reduction": ("gradients",), "threads": (), "clip_norm": ("after",), "non_finite": ("after",)}
_CONFIG_CAUSES = {"seed": Cause.MODEL_RANDOM, "batch_norm": Cause.BATCH_NORM, "reduction": Cause.REDUCTION}
# Causes of a difference between two equal runs, in quantities that are computed from the seed without arithmetic.
_UNSEEDED_CAUSES = {
    "order": Cause.DATA_ORDER,
    "microbatches": Cause.MICROBATCHES,
    "rates": Cause.LEARNING_RATE,
    "settings": Cause.SETTINGS,
}
_EXPERIMENTS = {
    Cause.THREADS: "with one thread per rank",
    Cause.UNSYNCHRONISED: "with that state reset to its first value",
    Cause.MODEL_RANDOM: "without its random numbers (generators seeded by microbatch, or evaluation mode)",
    Cause.LEARNING_RATE: "with the learning rates of the reference",
    Cause.BATCH_NORM: "with this module in evaluation mode",
    Cause.REDUCTION: "with the exact reduction",
}


class Attribution:
    """Experiments on one pair of runs."""

    def __init__(self, runner: TrialRunner, reference: Record, other: Record) -> None:
        self._runner, self._reference, self._other = runner, reference, other
        self._one, self._many = reference.processes, other.processes

    def find(self, first: Difference | None) -> Finding:
        """Return the cause of the first difference; None stands for a failure before one."""
        resume = self._check_resume(first)
        if resume is not None:
            return resume
        if first is None or first.stage == "steps":
            return self._end_of_run(first)
        finding = self._check_repetition() or self._check_rounding(first) or self._check_config(first)
        return finding or self._by_stage(first)

    def _by_stage(self, first: Difference) -> Finding:
        if first.stage in ("inputs", "targets"):
            return self._inputs(self._reference, self._other, first)
        if first.stage == "microbatches":
            evidence = f"{first.detail}: dropout, batch norm statistics and the order of sums depend on this number"
            return Finding(Cause.MICROBATCHES, first, (evidence,))
        if first.stage == "settings":
            return Finding(Cause.SETTINGS, first, (f"settings of the optimizer differ: {first.detail}",))
        methods = {
            "order": self._order,
            "rates": self._learning_rates,
            "outputs": self._forward,
            "loss": self._loss,
            "gradients": self._backward,
            "evaluation": self._evaluation,
        }
        return methods.get(first.stage, self._state)(first)

    def _steps(self, first: Difference) -> tuple[StepRecord, StepRecord]:
        """Return the step of a difference in both runs."""
        assert first.step is not None
        return self._reference.steps[first.step], self._other.steps[first.step]

    def _check_resume(self, first: Difference | None) -> Finding | None:
        """Return a finding if the killed and resumed run differs, but the uninterrupted run does not."""
        if not self._other.label:
            return None
        uninterrupted = self._runner.run(self._many, self._reference)
        if compare(self._reference, uninterrupted, self._runner.conditions.tolerance).failing:
            return None
        evidence = f"the uninterrupted run of {plural(self._many, 'process')} equals the reference"
        return Finding(Cause.RESUME, first, (evidence, *_failure_text(self._other.failure)))

    def _check_repetition(self) -> Finding | None:
        """Return a finding if two runs on the same number of processes differ."""
        base = self._runner.run(self._many)
        second = self._runner.repeat(base)
        first = first_of([difference for difference in compare(base, second, None).failing if difference.ranks is None])
        if first is None:
            return None
        evidence = f"{plural(self._many, 'process')}, run twice, differ between the runs: {first.location}"
        if first.stage in _UNSEEDED_CAUSES:
            return Finding(_UNSEEDED_CAUSES[first.stage], first, (evidence, "this does not depend on the seed alone"))
        if first.stage in ("inputs", "targets"):
            finding = self._inputs(base, second, first)
            return Finding(finding.cause, first, (evidence, *finding.evidence))
        if first.stage == "before":
            cause = Cause.INITIAL_WEIGHTS if first.step == 1 else Cause.UNSYNCHRONISED
            return Finding(cause, first, (evidence, "the state is not seeded, or changes between steps"))
        if first.stage in ("outputs", "loss", "gradients"):
            return self._repeat_in_double(first, evidence)
        return Finding(Cause.UNKNOWN, first, (evidence,))

    def _repeat_in_double(self, first: Difference, evidence: str) -> Finding:
        """Return the cause of different arithmetic in two equal runs: the order of sums, or random numbers."""
        exact = self._runner.run(self._many, double=True)
        size = _largest_distance(compare(exact, self._runner.repeat(exact, double=True), None))
        if size < _ROUNDING:
            rounding = f"in float64 the distance is at most {size:.1e}: rounding, in another order each time"
            return Finding(Cause.KERNEL, first, (evidence, rounding))
        return Finding(Cause.MODEL_RANDOM, first, (evidence, f"in float64 the distance is {size:.1e}: not rounding"))

    def _check_rounding(self, first: Difference) -> Finding | None:
        """Return a finding if allowed rounding grew beyond the tolerance."""
        tolerance = self._runner.conditions.tolerance
        if tolerance is None or first.distance is None or first.stage == "evaluation":
            return None
        evidence = f"the distance is {first.distance:.1e}, the tolerance {tolerance:g}"
        return self._experiment(first, Cause.REDUCTION, (evidence,), reduction="exact")

    def _check_config(self, first: Difference) -> Finding | None:
        """Return a finding if the engine's configuration depends on the number of processes."""
        ours, theirs = self._reference.config, self._other.config
        different = [key for key in ours if ours[key] != theirs.get(key)]
        keys = [key for key in different if first.stage in _CONFIG_STAGES.get(key, _AFTER_INPUTS)]
        if not keys or keys == ["threads"]:
            return None
        values = ", ".join(f"{key} {ours[key]} and {theirs.get(key)}" for key in keys)
        evidence = f"the configurations of the engines differ: {values}"
        return Finding(_CONFIG_CAUSES.get(keys[0], Cause.SETTINGS), first, (evidence,))

    def _end_of_run(self, first: Difference | None) -> Finding:
        """Return the cause of an early end, or of a different number of steps."""
        failure = self._other.failure
        error = _failure_text(failure)
        if failure is not None and failure.kind == "UnusedParameterError":
            return Finding(Cause.UNUSED, first, error)
        is_stuck = any(note["kind"] == "stuck" for notes in self._other.events for note in notes)
        if is_stuck or (failure is not None and failure.kind in _DESYNC_ERRORS):
            steps = [len({note["step"] for note in notes if note["kind"] == "step"}) for notes in self._other.events]
            counts = ", ".join(f"rank {rank} made {number} steps" for rank, number in enumerate(steps))
            return Finding(Cause.DIVERGED, first, (counts, *error))
        if failure is not None and failure.code in _RANK_CAUSES:
            return Finding(_RANK_CAUSES[failure.code], first, error)
        missing = self._reference.steps.get(first.step) if first and first.step else None
        if missing is not None and missing.main["ends_epoch"]:
            last = missing.main
            evidence = (
                f"step {last['step']}, the last batch of the epoch with {len(last['order'])} samples, is present on "
                f"{plural(self._one, 'process')} and missing on {plural(self._many, 'process')}"
            )
            return Finding(Cause.LAST_BATCH, first, (evidence, *error))
        if failure is not None:
            return Finding(Cause.FAILED, first, error)
        return Finding(Cause.DATA_ORDER, first, (f"{len(self._reference.steps)} and {len(self._other.steps)} steps",))

    def _order(self, first: Difference) -> Finding:
        """Return the cause of different indices: another last batch of the epoch, or another order."""
        steps = [step.main for step in self._steps(first)]
        sizes = [len(step["order"]) for step in steps]
        counts = f"{sizes[0]} samples and {sizes[1]} samples"
        if first.ranks is None and first.step != 1 and any(step["ends_epoch"] for step in steps):
            return Finding(Cause.LAST_BATCH, first, (f"all earlier steps have equal samples; this step has {counts}",))
        if sizes[0] != sizes[1]:
            evidence = f"global batches of {counts}: batch_size or the dataset depends on the number of processes"
            return Finding(Cause.DATA_ORDER, first, (evidence,))
        return Finding(Cause.DATA_ORDER, first, (first.detail,))

    def _inputs(self, one: Record, other: Record, first: Difference) -> Finding:
        """Return the cause of different inputs or targets at equal indices: other samples, or another augmentation."""
        assert first.step is not None and first.microbatch is not None
        ours, theirs = one.steps[first.step].microbatches, other.steps[first.step].microbatches
        repeated = self._runner.run(1, repeat_samples=True).folder
        for file, action, kind in (("differing", "read", "samples"), ("collated", "collated", "microbatches")):
            differing = repeated / f"{file}.txt"
            if differing.exists():
                number = len(set(differing.read_text(encoding="utf-8").split()))
                evidence = (
                    f"{action} twice in one process with equal states of the seeded generators, {number} {kind} differ"
                    ": they depend on another source of random numbers"
                )
                return Finding(Cause.AUGMENTATION, first, (evidence,))
        changed = set(theirs[first.microbatch]["rows"]) - set(ours[first.microbatch]["rows"])
        known = {row for step in one.steps.values() for note in step.microbatches.values() for row in note["rows"]}
        if changed and changed <= known:
            evidence = "indices are equal, but stand for other samples of the dataset"
            return Finding(Cause.DATA_ORDER, first, (evidence,))
        equal = "read twice in one process, samples are equal"
        if any(ours[number]["targets"] != theirs[number]["targets"] for number in ours.keys() & theirs.keys()):
            evidence = "targets differ together with inputs: equal indices stand for other samples of the dataset"
            return Finding(Cause.DATA_ORDER, first, (equal, evidence))
        return Finding(Cause.AUGMENTATION, first, (equal, "samples depend on the process or on the time of its start"))

    def _learning_rates(self, first: Difference) -> Finding:
        evidence = f"learning rates are {first.detail}"
        rates = tuple(tuple(step.main["rates"]) for step in self._reference.steps.values())
        finding = self._experiment(first, Cause.LEARNING_RATE, (evidence,), learning_rates=rates)
        return finding or Finding(Cause.LEARNING_RATE, first, (evidence,))

    def _forward(self, first: Difference) -> Finding:
        name = first.module or ""
        kind = self._reference.engine.get("modules", {}).get(name, "")
        seen = f"inputs and weights are equal; {name or 'the model'} ({kind}) is the first with a different output"
        finding = (
            self._threads(first, seen)
            or self._experiment(first, Cause.UNSYNCHRONISED, (seen, *self._changed_state()), reset_state=True)
            or self._experiment(first, Cause.MODEL_RANDOM, (seen,), seed_generators=True)
            or self._evaluation_mode(first, seen)
            or self._extra_forward(first, seen)
        )
        return finding or Finding(Cause.UNKNOWN, first, (seen, *self._float64_text()))

    def _evaluation_mode(self, first: Difference, seen: str) -> Finding | None:
        """Return a finding if the module is equal in evaluation mode: it draws numbers, or sees other microbatches."""
        name, microbatches = first.module or "", self._steps(first)[0].microbatches
        collectives = max((note["collectives"] for note in microbatches.values()), default=0)
        if not collectives and name not in self._reference.engine.get("norms", ()):
            return self._experiment(first, Cause.MODEL_RANDOM, (seen,), eval_module=name)
        evidence = (
            f"the forward of a microbatch issues {collectives} collectives, so it depends on concurrent microbatches"
            if collectives
            else "it is a norm layer with statistics of a batch"
        )
        finding = self._experiment(first, Cause.BATCH_NORM, (seen, evidence), eval_module=name)
        return finding or (Finding(Cause.BATCH_NORM, first, (seen, evidence)) if collectives else None)

    def _extra_forward(self, first: Difference, seen: str) -> Finding | None:
        """Return a finding if a forward depends on an earlier forward, although all known state was restored."""
        extra = self._runner.run(self._one, self._reference, extra_forward=True)
        changed = compare(self._reference, extra, None).first
        if changed is None or changed.stage != "outputs":
            return None
        evidence = (
            "an extra forward before that of the microbatch, with all known state restored, changes its output: the "
            "model draws from a hidden generator that advances with every call"
        )
        return Finding(Cause.MODEL_RANDOM, first, (seen, evidence))

    def _loss(self, first: Difference) -> Finding:
        seen = "order, inputs, weights and outputs of the microbatch are equal, its loss differs"
        if first.microbatch is None:
            seen = "losses of all microbatches are equal, their mean differs"
        finding = self._threads(first, seen) or repeatability_finding(self._reference.notes("additivity"), first)
        return finding or Finding(Cause.LOSS, first, (seen, first.detail, *self._float64_text()))

    def _backward(self, first: Difference) -> Finding:
        seen = "outputs and losses of all microbatches are equal, the gradient of the batch differs"
        finding = None
        if "fast" in [record.config.get("reduction") for record in (self._reference, self._other)]:
            finding = self._experiment(first, Cause.REDUCTION, (seen,), reduction="exact")
        finding = finding or self._threads(first, seen) or self._scale(first, seen)
        if finding is not None:
            return finding
        size = self._float64_distance()
        return Finding(Cause.REDUCTION if size < _ROUNDING else Cause.UNKNOWN, first, (seen, _rounding_text(size)))

    def _scale(self, first: Difference, seen: str) -> Finding | None:
        """Return a finding if the gradient is that of the reference times a power of the number of processes."""
        norm, other = (step.main["grad_norm"] for step in self._steps(first))
        ratio, by = other / norm if norm else 1.0, self._many / self._one
        for factor in (by, 1 / by, by**2, 1 / by**2):
            if factor != 1 and abs(ratio / factor - 1) < _SAME_RATIO:
                evidence = (
                    f"the gradient is {factor:g} times as long: one summation over processes, or one division by their "
                    "number, too many"
                )
                return Finding(Cause.LOSS, first, (seen, evidence))
        return None

    def _state(self, first: Difference) -> Finding:
        assert first.step is not None
        if first.stage == "before" and first.step == 1:
            return Finding(Cause.INITIAL_WEIGHTS, first, ("weights or buffers differ before the first step",))
        if first.stage == "before":
            seen = f"equal after step {first.step - 1}; changed between two steps"
        else:
            seen = "gradients and losses are equal, the state after the step differs"
        if first.tensor in self._reference.engine.get("averaged", ()) and first.ranks is None:
            evidence = f"{first.tensor} is a buffer that steps average over microbatches"
            return Finding(Cause.BATCH_NORM, first, (seen, evidence))
        kind = "buffer or tensor that steps do not average"
        if first.stage == "optimizer":
            kind = "tensor of the optimizer state"
        elif first.tensor in self._reference.engine.get("parameters", ()):
            kind = "parameter"
        return Finding(Cause.UNSYNCHRONISED, first, (seen, f"{first.tensor} is a {kind}"))

    def _evaluation(self, first: Difference) -> Finding:
        pairs = zip(self._reference.notes("evaluation"), self._other.notes("evaluation"), strict=False)
        is_same = all(one["before"] == other["before"] for one, other in pairs)
        seen = f"{'weights and buffers' if is_same else 'all training steps'} before the evaluation are equal"
        finding = self._experiment(first, Cause.UNSYNCHRONISED, (seen, *self._changed_state()), reset_state=True)
        return finding or Finding(Cause.EVALUATION, first, (seen, first.detail))

    def _threads(self, first: Difference, seen: str) -> Finding | None:
        if first.step is None:
            return None
        one, other = (step.threads for step in self._steps(first))
        if one == other and len(one) == 1:
            return None
        counts = " and ".join("/".join(map(str, sorted(threads))) for threads in (one, other))
        evidence = seen, f"ranks compute with {counts} threads"
        return self._experiment(first, Cause.THREADS, evidence, single_thread=True)

    def _experiment(self, first: Difference, cause: Cause, evidence: tuple[str, ...], **changes: Any) -> Finding | None:
        """Return the cause if, under the intervention, the difference disappears or only a later one remains."""
        remaining = self._compare_under(**changes).first
        if remaining is not None and remaining.order_key <= first.order_key:
            return None
        runs = f"{self._one} and {plural(self._many, 'process')}"
        result = f"{runs} are equal" if remaining is None else f"{runs} differ later only: {remaining.location}"
        return Finding(cause, first, (*evidence, f"{_EXPERIMENTS[cause]}, {result}"))

    def _compare_under(self, **changes: Any) -> Comparison:
        """Repeat both runs under interventions and compare with the tolerance of the verification."""
        reference = self._runner.run(self._one, **changes)
        measured = self._runner.run(self._many, reference, **changes)
        return compare(reference, measured, self._runner.conditions.tolerance)

    def _changed_state(self) -> tuple[str, ...]:
        """Return a sentence on the state that steps change and do not average."""
        names = {name: None for step in self._reference.steps.values() for name in step.main["changed_state"]}
        return (f"steps change {', '.join(list(names)[:5])} and do not average it",) if names else ()

    def _float64_text(self) -> tuple[str, ...]:
        return () if self._runner.conditions.interventions.double else (_rounding_text(self._float64_distance()),)

    def _float64_distance(self) -> float:
        return _largest_distance(self._compare_under(double=True))


def _failure_text(failure: Failure | None) -> tuple[str, ...]:
    """Return the error without expectation and fix, since a finding has its own fix."""
    text = failure.text.removeprefix("error: ").partition("\n  expected: ")[0] if failure else ""
    return (text,) if text else ()


def _rounding_text(size: float) -> str:
    return f"in float64 the distance is {size:.1e}: {'rounding' if size < _ROUNDING else 'not rounding'}"


def _largest_distance(comparison: Comparison) -> float:
    """Return the largest distance in the first step that differs; 0 if all bits are equal."""
    first = comparison.first
    if first is None:
        return max((difference.distance or 0.0 for difference in comparison.differences), default=0.0)
    stages = ("outputs", "loss", "gradients")
    sizes = [d.distance for d in comparison.failing if d.step == first.step and d.stage in stages]
    return max((size for size in sizes if size is not None), default=float("inf"))
