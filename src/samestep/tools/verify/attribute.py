"""From a difference to its cause, by experiments: the two runs once more with one thing held still.

What is held cannot be the cause if the difference stays, and is it if the difference goes.
"""

from __future__ import annotations

from samestep.config import Reduction
from samestep.runtime.failure import Failure
from samestep.tools.verify.causes import Cause, Finding, where
from samestep.tools.verify.compare import compare
from samestep.tools.verify.difference import Comparison, Difference
from samestep.tools.verify.lab import Lab
from samestep.tools.verify.plan import Held, in_words
from samestep.tools.verify.record import Record, StepRecord
from samestep.tools.verify.repeat import ROUNDING, largest_distance, unrepeatable
from samestep.tools.verify.samples import inputs_finding, order_finding

# Errors of a rank that does something else than the others.
_OUT_OF_STEP = ("RollCallError", "PeerLostError")


def attribute(lab: Lab, reference: Record, other: Record, first: Difference | None) -> Finding:
    """Why `other` differs from `reference`, given the first difference, or None where a run failed before one."""
    return _Attribution(lab, reference, other).find(first)


class _Attribution:
    def __init__(self, lab: Lab, reference: Record, other: Record) -> None:
        self._lab, self._reference, self._other = lab, reference, other
        self._one, self._many = reference.processes, other.processes

    def find(self, first: Difference | None) -> Finding:
        """The cause, looked for where the first difference stands."""
        return self._resumed(first) or self._run_through(first)

    def _resumed(self, first: Difference | None) -> Finding | None:
        """Killed and resumed runs differ where others do not."""
        if not self._other.label:
            return None
        whole = self._lab.trial(self._many, reference=self._reference)
        if compare(self._reference, whole, self._lab.conditions.tolerance).failing:
            return None
        told = _told(self._other.failure)
        seen = f"the run of {in_words(self._many)} that nobody killed computes the same as the reference"
        return Finding(Cause.RESUME, first, tuple(filter(None, (seen, told))))

    def _run_through(self, first: Difference | None) -> Finding:
        if first is None or first.stage == "steps":
            return self._ended(first)
        by_stage = {
            "before": self._state,
            "order": lambda first: order_finding(self._reference, self._other, first),
            "shards": self._shards,
            "inputs": self._inputs,
            "targets": self._inputs,
            "rates": self._rates,
            "settings": self._settings,
            "outputs": self._forward,
            "loss": self._loss,
            "gradients": self._backward,
            "after": self._state,
            "optimizer": self._state,
            "evaluation": self._evaluation,
        }
        found = unrepeatable(self._lab, self._many) or self._grown(first)
        return found or self._ruled(first) or by_stage[first.stage](first)

    def _ruled(self, first: Difference) -> Finding | None:
        """Rules of the step that depend on the number of processes, where what they rule differs."""
        ours, theirs = self._reference.rules, self._other.rules
        keys = [key for key in ours if ours[key] != theirs.get(key) and first.stage in _RULED.get(key, _AFTER_INPUTS)]
        causes = {"seed": Cause.MODEL_RANDOM, "batch_norm": Cause.BATCH_NORM, "reduction": Cause.REDUCTION}
        if not keys or keys == ["threads"]:
            return None
        said = ", ".join(f"{key} {ours[key]} and {theirs.get(key)}" for key in keys)
        return Finding(causes.get(keys[0], Cause.RULES), first, (f"the engine's rules are not the same: {said}",))

    def _shards(self, first: Difference) -> Finding:
        evidence = f"{first.detail}: dropout, groups of batch norm and the order of sums depend on them"
        return Finding(Cause.SHARDS, first, (evidence,))

    def _inputs(self, first: Difference) -> Finding:
        return inputs_finding(self._lab, self._reference, self._other, first)

    def _settings(self, first: Difference) -> Finding:
        return Finding(Cause.RULES, first, (f"settings of the optimizer differ: {first.detail}",))

    def _grown(self, first: Difference) -> Finding | None:
        """Rounding that was allowed, and grew beyond what is."""
        if self._lab.conditions.tolerance is None or first.distance is None or first.stage == "evaluation":
            return None
        seen = f"{first.distance:.1e} apart, where {self._lab.conditions.tolerance:g} is allowed"
        return self._held(first, Cause.REDUCTION, self._lab.hold(reduction="exact"), (seen,))

    def _ended(self, first: Difference | None) -> Finding:
        """A run that ended early, or has other steps than the reference."""
        failure = self._other.failure
        told = _told(failure)
        if failure is not None and failure.kind == "UnusedParameterError":
            return Finding(Cause.UNUSED, first, (told,))
        if self._other.is_stuck or (failure is not None and failure.kind in _OUT_OF_STEP):
            made = [len({n["step"] for n in notes if n["kind"] == "step"}) for notes in self._other.events]
            steps = ", ".join(f"rank {rank} made {number} steps" for rank, number in enumerate(made))
            return Finding(Cause.DIVERGED, first, (steps, *([told] if told else [])))
        missing = self._reference.steps.get(first.step) if first and first.step else None
        if missing is not None and missing.main["ends_epoch"]:
            what = f"step {missing.number} is the last batch of the epoch, of {len(missing.main['order'])} samples"
            not_made = f"on {in_words(self._one)} {what}; on {in_words(self._many)} it is not made"
            return Finding(Cause.LAST_BATCH, first, (not_made, *([told] if told else [])))
        if failure is not None:
            return Finding(Cause.FAILED, first, (told,))
        return Finding(Cause.DATA_ORDER, first, (f"{len(self._reference.steps)} and {len(self._other.steps)} steps",))

    def _rates(self, first: Difference) -> Finding:
        rates = tuple(tuple(step.main["rates"]) for step in self._reference.steps.values())
        _, _, compared = self._lab.pair(self._one, self._many, self._lab.hold(rates=rates))
        evidence = f"learning rates are {first.detail}"
        if _goes(compared, first):
            return Finding(
                Cause.LEARNING_RATE, first, (evidence, "with the reference's rates, " + self._rest(compared))
            )
        return Finding(Cause.LEARNING_RATE, first, (evidence,))

    def _forward(self, first: Difference) -> Finding:
        step = self._step(first)
        name = first.module or ""
        kind = self._reference.engine.get("modules", {}).get(name, "")
        seen = f"inputs and weights are the same; {name or 'the model'} ({kind}) is the first whose output differs"
        found = self._threads(first, seen) or self._held(
            first, Cause.UNSYNCHRONISED, self._lab.hold(state=True), (seen, self._remembered())
        )
        found = found or self._held(first, Cause.MODEL_RANDOM, self._lab.hold(generators=True), (seen,))
        found = found or self._in_evaluation_mode(first, step, seen) or self._rehearsed(first, seen)
        return found or Finding(Cause.UNKNOWN, first, (seen, *self._in_double(first)))

    def _in_evaluation_mode(self, first: Difference, step: StepRecord, seen: str) -> Finding | None:
        """A module that computes the same in evaluation mode draws random numbers, or looks at other shards."""
        name = first.module or ""
        is_norm = name in self._reference.engine.get("norms", ())
        if not step.collectives and not is_norm:
            return self._held(first, Cause.MODEL_RANDOM, self._lab.hold(resting=name), (seen,))
        looks = f"the forward of a shard issues {step.collectives} collectives: it sees what others compute just then"
        evidence = (seen, looks if step.collectives else "it is a norm layer, which uses statistics of a batch")
        found = self._held(first, Cause.BATCH_NORM, self._lab.hold(resting=name), evidence)
        return found or (Finding(Cause.BATCH_NORM, first, evidence) if step.collectives else None)

    def _rehearsed(self, first: Difference, seen: str) -> Finding | None:
        """A forward that goes otherwise because there was another one before it keeps something from call to call."""
        rehearsed = self._lab.trial(self._one, self._lab.hold(rehearsed=True), reference=self._reference)
        again = compare(self._reference, rehearsed, None).first
        if again is None or again.stage != "outputs":
            return None
        evidence = "computed once before with all known state restored, a shard comes out otherwise: it draws from a "
        return Finding(
            Cause.MODEL_RANDOM, first, (seen, f"{evidence}generator of its own that goes on from call to call")
        )

    def _loss(self, first: Difference) -> Finding:
        seen = "order, inputs, weights and outputs of the shard are the same, its loss is not"
        if first.shard is None:
            seen = "losses of all shards are the same, their mean is not"
        threads = self._threads(first, seen)
        return threads or Finding(Cause.LOSS, first, (seen, first.detail, *self._in_double(first)))

    def _backward(self, first: Difference) -> Finding:
        seen = "outputs and losses of every shard are the same, the gradient of the batch is not"
        used: list[Reduction] = [record.rules.get("reduction", "exact") for record in (self._reference, self._other)]
        found = None
        if "fast" in used:
            found = self._held(first, Cause.REDUCTION, self._lab.hold(reduction="exact"), (seen,))
        return found or self._threads(first, seen) or self._scaled(first, seen) or self._rounded(first, seen)

    def _scaled(self, first: Difference, seen: str) -> Finding | None:
        """A gradient that is a multiple of the reference's by the number of processes."""
        assert first.step is not None
        ours, theirs = (record.steps[first.step].main["grad_norm"] for record in (self._reference, self._other))
        ratio = theirs / ours if ours else 1.0
        by = self._many / self._one
        for factor in (by, 1 / by, by**2, 1 / by**2):
            if factor != 1 and abs(ratio / factor - 1) < _SAME_RATIO:
                told = f"it is {factor:g} times as long: summed or divided by the number of processes once too often"
                return Finding(Cause.LOSS, first, (seen, told))
        return None

    def _rounded(self, first: Difference, seen: str) -> Finding:
        size = self._double_distance()
        word = "rounding" if size < ROUNDING else "not rounding"
        cause = Cause.REDUCTION if size < ROUNDING else Cause.UNKNOWN
        return Finding(cause, first, (seen, f"in float64 the two are {size:.1e} apart: {word}"))

    def _state(self, first: Difference) -> Finding:
        assert first.step is not None
        if first.stage == "before" and first.step == 1:
            return Finding(Cause.INITIAL_WEIGHTS, first, ("they differ before anything was trained",))
        if first.stage == "before":
            seen = f"after step {first.step - 1} it was the same; it was changed between two steps"
        else:
            seen = "gradients and losses are the same; what the step leaves is not"
        is_averaged = first.tensor in self._reference.engine.get("averaged", ())
        if is_averaged and first.ranks is None:
            return Finding(Cause.BATCH_NORM, first, (seen, "it is a statistic that steps average over shards"))
        kind = (
            "parameter" if first.tensor in self._reference.parameters else "buffer or tensor that steps do not average"
        )
        named = f"{first.tensor} is a {kind}" if first.stage != "optimizer" else f"{first.tensor} is optimizer state"
        return Finding(Cause.UNSYNCHRONISED, first, (seen, named))

    def _evaluation(self, first: Difference) -> Finding:
        pairs = zip(self._reference.evaluations, self._other.evaluations, strict=False)
        same = all(ours["before"] == theirs["before"] for ours, theirs in pairs)
        seen = "weights and buffers before it are the same" if same else "every training step before it is the same"
        held = self._held(first, Cause.UNSYNCHRONISED, self._lab.hold(state=True), (seen, self._remembered()))
        return held or Finding(Cause.EVALUATION, first, (seen, first.detail))

    def _threads(self, first: Difference, seen: str) -> Finding | None:
        if first.step is None:
            return None
        threads = [record.steps[first.step].threads for record in (self._reference, self._other)]
        if threads[0] == threads[1] and all(len(each) == 1 for each in threads):
            return None
        counts = " and ".join("/".join(map(str, sorted(each))) for each in threads)
        return self._held(
            first, Cause.THREADS, self._lab.hold(one_thread=True), (seen, f"ranks compute with {counts} threads")
        )

    def _held(self, first: Difference, cause: Cause, held: Held, evidence: tuple[str, ...]) -> Finding | None:
        """The cause, if the difference goes when this is held."""
        _, _, compared = self._lab.pair(self._one, self._many, held)
        if not _goes(compared, first):
            return None
        return Finding(cause, first, tuple(filter(None, (*evidence, f"{_HELD[cause]}, {self._rest(compared)}"))))

    def _rest(self, compared: Comparison) -> str:
        pair = f"{self._one} and {in_words(self._many)}"
        return (
            f"{pair} compute the same"
            if compared.first is None
            else f"{pair} differ only later: {where(compared.first)}"
        )

    def _in_double(self, first: Difference) -> tuple[str, ...]:
        """How far apart the two are in float64: rounding, or wrong mathematics."""
        if self._lab.conditions.held.double:
            return ()
        size = self._double_distance()
        return (f"in float64 the two are {size:.1e} apart: {'rounding' if size < ROUNDING else 'not rounding'}",)

    def _double_distance(self) -> float:
        return largest_distance(self._lab.pair(self._one, self._many, self._lab.hold(double=True))[2])

    def _step(self, first: Difference) -> StepRecord:
        assert first.step is not None
        return self._reference.steps[first.step]

    def _remembered(self) -> str:
        """What steps change besides the state that is averaged."""
        names = {name: None for step in self._reference.steps.values() for name in step.main["remembered"]}
        return f"steps change {', '.join(list(names)[:5])}, which nobody averages" if names else ""


# Where a rule shows first.
_AFTER_INPUTS = ("outputs", "loss", "gradients", "after", "optimizer")
_RULED = {"reduction": ("gradients",), "threads": (), "clip_norm": ("after",), "non_finite": ("after",)}
# Rounding of a norm in float32 is far below, and any two of the factors are far apart.
_SAME_RATIO = 1e-4
_HELD = {
    Cause.THREADS: "with one thread a rank",
    Cause.UNSYNCHRONISED: "with that state as it was at first",
    Cause.MODEL_RANDOM: "with its random numbers out of the way (generators seeded by shard, or evaluation mode)",
    Cause.BATCH_NORM: "with this module in evaluation mode",
    Cause.REDUCTION: "with the exact reduction",
}


def _told(failure: Failure | None) -> str:
    """What a rank said; rule and way out are the finding's own."""
    return failure.text.removeprefix("error: ").partition("\n  rule: ")[0] if failure else ""


def _goes(compared: Comparison, first: Difference) -> bool:
    return compared.first is None or compared.first.place > first.place
