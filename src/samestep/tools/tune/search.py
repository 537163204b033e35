"""Which setting is the fastest, found by few and short turns.

Turns are compared within a round only, in which all settings have one after the other, every second round backwards: a
machine that gets slower does so for all of them. A setting's score is the median over rounds of its samples a second
against those of one setting that has a turn in every round.

Three things save time. Where steps do not wait for data though there are no workers, nothing is looked for: workers
could gain no more than the wait. Numbers of workers are doubled only for as long as that pays. And longer looks are for
the few that are near the best, fewer of them each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from samestep.tools.timed import Spread, Timed
from samestep.tools.tune.setting import Setting

Measure = Callable[[Setting], Timed]

SMALL = 0.02  # of a step: what no setting can gain is not looked for
ALIKE = 0.02  # settings that differ by less are as fast as each other
_WORTH = 1.04  # what twice as many workers must gain, for more to be looked at
_MOST = 0.5  # of a step: where so much is left to gain, one more disappointment is borne
_FAR = 0.65  # of the best: not looked at again
_KEPT = (5, 3, 2, 2)  # how many go into each round of the final
_NEAR = (0.0, 0.9, 0.94, 0.96)  # of the best: what they must have reached before, on a quiet machine
_STEADY, _ENOUGH = 0.05, 3  # where turns of a setting differ by less, so many rounds are enough
_WILD = 0.3  # no more is put down to the machine


@dataclass
class Found:
    """What was found of settings.

    Attributes:
        default: what a run has where nobody says anything.
        rounds: the turns of each round; the first one begins with the default.
        chosen: the fastest; of those that are as fast, the default, or else the one with the fewest workers.
        reason: why nothing else was looked at, where that is so.
    """

    default: Setting
    rounds: list[dict[Setting, Timed]] = field(default_factory=list)
    chosen: Setting | None = None
    reason: str = ""

    @property
    def settings(self) -> list[Setting]:
        """Those that had a turn, in order."""
        return sorted({setting for turns in self.rounds for setting in turns})

    @property
    def turns(self) -> int:
        """How many there were."""
        return sum(len(turns) for turns in self.rounds)

    def of(self, setting: Setting) -> list[Timed]:
        """The turns of a setting."""
        return [turns[setting] for turns in self.rounds if setting in turns]

    @property
    def anchor(self) -> Setting:
        """The best of the first round, which has a turn in each other one."""
        return max(self.rounds[0], key=lambda each: self.rounds[0][each].samples_per_second)

    def speed(self, setting: Setting) -> Spread:
        """Samples a second; of the anchor as they were, of others by what they were against it in the same rounds."""
        own = Spread.of([timed.samples_per_second for timed in self.of(self.anchor)])
        return own if setting == self.anchor else self.against(setting, self.anchor).times(own.median)

    def data_share(self, setting: Setting) -> float:
        """How much of a step is the wait for data."""
        return statistics.median(timed.data_share for timed in self.of(setting))

    def against(self, setting: Setting, other: Setting, rounds: slice = slice(None)) -> Spread:
        """A setting's samples a second in those of another one, over the rounds in which both had a turn."""
        both = [turns for turns in self.rounds[rounds] if setting in turns and other in turns]
        return Spread.of([t[setting].samples_per_second / t[other].samples_per_second for t in both])

    def against_default(self, setting: Setting) -> Spread:
        """A setting's samples a second in those of the default; by way of the anchor, where no round has both."""
        if any(setting in turns and self.default in turns for turns in self.rounds):
            return self.against(setting, self.default)
        return self.against(setting, self.anchor).times(self.against(self.anchor, self.default).median)

    def verdict(self, setting: Setting) -> str:
        """What is to be said of a setting, in a word or two."""
        if setting == self.chosen:
            return "chosen"
        assert self.chosen is not None
        score = self.against_default(setting).median / self.against_default(self.chosen).median
        return "slower" if score < 1 - ALIKE else "as fast" if score <= 1 + ALIKE else "not steadily faster"


def search(measure: Measure, settings: Sequence[Setting], default: Setting) -> Found:
    """Find the fastest of `settings`.

    Args:
        measure: takes one turn of a setting.
        default: has turns, whether it is one of `settings` or not.
    """
    found = Found(default, [{}])
    first = found.rounds[0]
    first[default] = measure(default)
    if not default.workers and first[default].data_share <= SMALL:
        found.rounds.append({default: measure(default)})
        if found.data_share(default) <= SMALL:
            found.chosen = default
            found.reason = "batches are there before they are needed, so no other setting can be faster"
            return found
    best = _climb(measure, settings, first)
    _final(measure, found, _finalists(settings, first, best), best)
    found.chosen = _fastest(found, best)
    return found


def _climb(measure: Measure, settings: Sequence[Setting], turns: dict[Setting, Timed]) -> Setting:
    """Twice as many workers again and again, for as long as that pays; the best of them."""
    shortest = min(setting.prefetch for setting in settings)
    ladder = sorted({setting for setting in settings if setting.prefetch == shortest or not setting.workers})
    best, since, last = ladder[0], 0, -1
    for setting in ladder:
        if setting.workers < 2 * last:
            continue
        last = setting.workers
        if setting not in turns:
            turns[setting] = measure(setting)
        pays = turns[setting].samples_per_second > _WORTH * turns[best].samples_per_second
        best, since = (setting, 0) if pays or setting == best else (best, since + 1)
        share = turns[setting].data_share
        # One worker beside nothing is often slower: batches change hands, and no two are made at once.
        is_patient = share > _MOST or not best.workers
        if share <= SMALL or since == (3 if is_patient else 2):
            break
    return max(turns, key=lambda setting: turns[setting].samples_per_second)


def _finalists(settings: Sequence[Setting], turns: dict[Setting, Timed], best: Setting) -> list[Setting]:
    """The best so far, its neighbours that had no turn yet, and what came near to it, likeliest first."""
    speeds = {setting: timed.samples_per_second for setting, timed in turns.items()}
    alike = [setting for setting in settings if setting.prefetch == best.prefetch]
    neighbours = [
        *sorted((s for s in alike if s.workers > best.workers), key=lambda s: s.workers)[:1],
        *sorted((s for s in alike if s.workers < best.workers), key=lambda s: -s.workers)[:1],
    ]
    waits = turns[best].data_share > SMALL
    longer = [setting for setting in settings if setting.workers == best.workers and setting != best]
    if not waits:  # more of anything gains nothing; fewer workers may do
        neighbours, longer = neighbours[-1:] if neighbours[-1:] < [best] else [], []
    near = sorted((s for s in speeds if speeds[s] > _FAR * speeds[best] and s != best), key=lambda s: -speeds[s])
    found = [best, *near[:1], *neighbours, *longer[:1], *near[1:]]
    return [s for s in dict.fromkeys(found) if s not in speeds or speeds[s] > _FAR * speeds[best]]


def _final(measure: Measure, found: Found, settings: list[Setting], best: Setting) -> None:
    """Rounds of fewer and fewer settings, the best of the climb in all of them; more rounds where turns differ."""
    for number, (kept, near) in enumerate(zip(_KEPT, _NEAR, strict=True)):
        if number:
            noise = _noise(found, best)
            scores = {setting: found.against(setting, best, slice(1, None)).median for setting in settings}
            settings = sorted(scores, key=lambda setting: -scores[setting])
            settings = [setting for setting in settings if scores[setting] >= (near - noise) * scores[settings[0]]]
            if number >= _ENOUGH and noise < _STEADY:
                return
        settings = settings[:kept]
        if settings == [best]:
            return
        turns: dict[Setting, Timed] = {}
        for setting in sorted({*settings, best}, reverse=number % 2 == 0):
            turns[setting] = measure(setting)
        found.rounds.append(turns)


def _noise(found: Found, best: Setting) -> float:
    """By how much a ratio differs from one round to the next, as a rule."""
    ratios = [
        [
            turns[setting].samples_per_second / turns[best].samples_per_second
            for turns in found.rounds
            if setting in turns
        ]
        for setting in found.settings
        if setting != best
    ]
    reach = [(max(several) - min(several)) / (max(several) + min(several)) for several in ratios if len(several) > 1]
    return min(_WILD, statistics.median(reach)) if reach else 0.0


def _fastest(found: Found, best: Setting) -> Setting:
    """The fastest of the last round: who left before had fewer turns, and may have been lucky in them."""
    final = slice(1, None) if len(found.rounds) > 1 else slice(None)
    scores = {setting: found.against(setting, best, final).median for setting in found.rounds[-1]}
    most = max(scores.values())
    alike = [setting for setting, score in scores.items() if score >= (1 - ALIKE) * most]
    return found.default if found.default in alike else min(alike)
