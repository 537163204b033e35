"""Why two runs are made of other samples, or of the same samples made otherwise."""

from __future__ import annotations

from samestep.tools.verify.causes import Cause, Finding
from samestep.tools.verify.difference import Difference
from samestep.tools.verify.lab import Lab
from samestep.tools.verify.record import Record


def order_finding(one: Record, other: Record, first: Difference) -> Finding:
    """For indices that differ: another batch at the end of an epoch, or another order."""
    assert first.step is not None
    pair = [record.steps[first.step] for record in (one, other)]
    sizes = [len(step.main["order"]) for step in pair]
    counted = f"{sizes[0]} samples and {sizes[1]} samples"
    if first.ranks is None and first.step > 1 and any(step.main["ends_epoch"] for step in pair):
        return Finding(
            Cause.LAST_BATCH, first, (f"every step before is made of the same samples; this one has {counted}",)
        )
    if sizes[0] != sizes[1]:
        return Finding(
            Cause.DATA_ORDER, first, (f"global batches of {counted}: batch_size or the dataset depends on the world",)
        )
    return Finding(Cause.DATA_ORDER, first, (first.detail,))


def inputs_finding(lab: Lab, one: Record, other: Record, first: Difference) -> Finding:
    """For inputs or targets that differ behind the same indices: other samples, or another augmentation."""
    if _are_known(one, other, first):
        evidence = "indices are the same, but other samples of the dataset stand behind them"
        return Finding(Cause.DATA_ORDER, first, (evidence,))
    notes = lab.trial(1, lab.hold(twice=True)).folder / "twice.txt"
    if notes.exists():
        number = len(set(notes.read_text(encoding="utf-8").split()))
        evidence = (
            f"asked for twice in one process, with the seeded generators in the same state, {number} samples differ: "
            "they draw from something else"
        )
        return Finding(Cause.AUGMENTATION, first, (evidence,))
    same = "asked for twice in one process, samples are the same"
    if _targets_differ(one, other, first):
        evidence = "targets differ with the inputs: other samples of the dataset stand behind the same indices"
        return Finding(Cause.DATA_ORDER, first, (same, evidence))
    return Finding(Cause.AUGMENTATION, first, (same, "they depend on which process makes them, or when it began"))


def _are_known(one: Record, other: Record, first: Difference) -> bool:
    """Whether the inputs that differ are found elsewhere in the first run."""
    assert first.step is not None and first.shard is not None
    ours = one.steps[first.step].shards[first.shard]["rows"]
    changed = [row for row in other.steps[first.step].shards[first.shard]["rows"] if row not in ours]
    known = {row for step in one.steps.values() for noted in step.shards.values() for row in noted["rows"]}
    return bool(changed) and all(row in known for row in changed)


def _targets_differ(one: Record, other: Record, first: Difference) -> bool:
    assert first.step is not None
    ours, theirs = one.steps[first.step].shards, other.steps[first.step].shards
    return any(ours[shard]["targets"] != theirs[shard]["targets"] for shard in ours if shard in theirs)
