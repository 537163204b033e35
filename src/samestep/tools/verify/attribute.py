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
from samestep.tools.verify.plan import Held
from samestep.tools.verify.record import Record, StepRecord
from samestep.tools.verify.repeat import ROUNDING, in_words, largest_distance, unrepeatable

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
            "order": self._order,
            "inputs": self._inputs,
            "targets": self._inputs,
            "rates": self._rates,
            "outputs": self._forward,
            "loss": self._loss,
            "gradients": self._backward,
            "after": self._state,
            "optimizer": self._state,
            "evaluation": self._evaluation,
        }
        return unrepeatable(self._lab, self._many) or self._grown(first) or by_stage[first.stage](first)

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

    def _order(self, first: Difference) -> Finding:
        assert first.step is not None
        pair = [record.steps[first.step] for record in (self._reference, self._other)]
        is_last = first.ranks is None and any(step.main["ends_epoch"] for step in pair)
        sizes = " and ".join(f"{len(step.main['order'])} samples" for step in pair)
        if is_last and first.step > 1:
            return Finding(
                Cause.LAST_BATCH, first, (f"every step before is made of the same samples; this one has {sizes}",)
            )
        return Finding(Cause.DATA_ORDER, first, (first.detail,))

    def _inputs(self, first: Difference) -> Finding:
        assert first.step is not None and first.shard is not None
        ours = self._reference.steps[first.step].shards[first.shard]["rows"]
        theirs = self._other.steps[first.step].shards[first.shard]["rows"]
        changed = [row for row in theirs if row not in ours]
        known = {
            row for step in self._reference.steps.values() for noted in step.shards.values() for row in noted["rows"]
        }
        if changed and all(row in known for row in changed):
            evidence = "indices are the same, but other samples of the dataset stand behind them"
            return Finding(Cause.DATA_ORDER, first, (evidence,))
        record = self._lab.trial(1, self._lab.hold(twice=True))
        notes = record.folder / "twice.txt"
        if notes.exists():
            count = len(set(notes.read_text(encoding="utf-8").split()))
            evidence = (
                f"asked for twice in one process, with the seeded generators in the same state, {count} samples "
                "differ: they draw from something else"
            )
        else:
            evidence = "asked for twice in one process, samples are the same: they depend on which process makes them"
        return Finding(Cause.AUGMENTATION, first, (evidence,))

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
            first, Cause.UNSYNCHRONISED, self._lab.hold(state=True), (seen, self._changed(step))
        )
        found = found or self._held(first, Cause.MODEL_RANDOM, self._lab.hold(generators=True), (seen,))
        if found is None:
            cause = Cause.BATCH_NORM if step.collectives else Cause.MODEL_RANDOM
            issued = (
                f"{step.collectives} collectives in the forward of a shard: it sees those computed at the same time"
            )
            evidence = (seen, issued) if step.collectives else (seen,)
            found = self._held(first, cause, self._lab.hold(resting=name), evidence)
            if found is None and step.collectives:
                found = Finding(cause, first, evidence)
        return found or Finding(Cause.UNKNOWN, first, (seen, *self._in_double(first)))

    def _loss(self, first: Difference) -> Finding:
        seen = "order, inputs, weights and outputs of the shard are the same, its loss is not"
        if first.shard is None:
            seen = "losses of all shards are the same, their mean is not"
        threads = self._threads(first, seen)
        return threads or Finding(Cause.LOSS, first, (seen, first.detail, *self._in_double(first)))

    def _backward(self, first: Difference) -> Finding:
        seen = "outputs and losses of every shard are the same, the gradient of the batch is not"
        used: list[Reduction] = [record.engine.get("reduction", "exact") for record in (self._reference, self._other)]
        found = None
        if "fast" in used:
            found = self._held(first, Cause.REDUCTION, self._lab.hold(reduction="exact"), (seen,))
        found = found or self._threads(first, seen)
        return found or Finding(Cause.UNKNOWN, first, (seen, *self._in_double(first)))

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
        return Finding(Cause.EVALUATION, first, (seen, first.detail))

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
        _, _, compared = self._lab.pair(self._one, self._many, self._lab.hold(double=True))
        size = largest_distance(compared)
        word = "rounding" if size < ROUNDING else "not rounding"
        return (f"in float64 the two are {size:.1e} apart: {word}",)

    def _step(self, first: Difference) -> StepRecord:
        assert first.step is not None
        return self._reference.steps[first.step]

    def _changed(self, step: StepRecord) -> str:
        """Tensors that the step changed though nobody averages them."""
        averaged = {*self._reference.parameters, *self._reference.engine.get("averaged", ())}
        before, after = step.main["before"], step.main["after"]
        names = [name for name in after if name not in averaged and before.get(name) != after[name]]
        return f"its forward changes {', '.join(names[:5])}, which steps do not average" if names else ""


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
