"""Search of the fastest loader setting in few and short trials.

Trials are compared only within a round, in which every setting has one trial, in reverse order in every second round:
a machine that becomes slower affects all settings alike. Three rules save time: there is no search if steps without
workers do not wait for data, which is all that workers could save; the number of workers is doubled only while that
pays; later rounds contain only the best settings, fewer in each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.tools.timing import Spread, Timing
from samestep.tools.tune.settings import Setting

Measure = Callable[[Setting], Timing]

SMALL = 0.02  # share of a step; a smaller possible gain ends the search
ALIKE = 0.02  # relative difference of settings that count as equally fast
_PAYS = 1.04  # least speed-up of more workers for a continued climb
_MUCH = 0.5  # share of a step; while the wait for data is longer, one more step of the climb without gain is allowed
_FAR = 0.65  # relative speed below which a setting gets no second trial
_FINALISTS = (5, 3, 2, 2)  # largest number of settings in each round of the final
_NEAR = (0.0, 0.9, 0.94, 0.96)  # least score of a setting in each of these rounds, without noise
_STEADY, _ENOUGH = 0.05, 3  # with less noise than this, so many rounds are enough
_MAX_NOISE = 0.3


@dataclass
class SearchResult:
    """Trials of a search."""

    default: Setting  # setting of a run without options
    rounds: list[dict[Setting, Timing]] = field(default_factory=list)  # the first begins with the default
    chosen: Setting | None = None  # the fastest; of equally fast ones the default, or else that with the fewest workers
    reason: str = ""  # why there was no search, if so

    @property
    def settings(self) -> list[Setting]:
        """Settings with a trial, in order."""
        return sorted({setting for trials in self.rounds for setting in trials})

    @property
    def trial_count(self) -> int:
        """Number of trials."""
        return sum(len(trials) for trials in self.rounds)

    def trials(self, setting: Setting) -> list[Timing]:
        """Return the trials of a setting."""
        return [trials[setting] for trials in self.rounds if setting in trials]

    @property
    def reference(self) -> Setting:
        """The fastest setting of the first round, which has a trial in every later round."""
        return max(self.rounds[0], key=lambda setting: self.rounds[0][setting].samples_per_second)

    def speed(self, setting: Setting) -> Spread:
        """Return samples per second; except for the reference, from ratios to the reference in the same rounds."""
        own = Spread.of([timing.samples_per_second for timing in self.trials(self.reference)])
        return own if setting == self.reference else self.ratio(setting, self.reference) * own.median

    def data_share(self, setting: Setting) -> float:
        """Return the share of a step spent waiting for data."""
        return statistics.median(timing.data_share for timing in self.trials(setting))

    def ratios(self, setting: Setting, other: Setting, rounds: slice = slice(None)) -> list[float]:
        """Return the speed relative to `other` in each round with trials of both."""
        both = [trials for trials in self.rounds[rounds] if setting in trials and other in trials]
        return [trials[setting].samples_per_second / trials[other].samples_per_second for trials in both]

    def ratio(self, setting: Setting, other: Setting, rounds: slice = slice(None)) -> Spread:
        """Return the speed relative to `other`, over rounds with trials of both."""
        return Spread.of(self.ratios(setting, other, rounds))

    def ratio_to_default(self, setting: Setting) -> Spread:
        """Return the speed relative to the default; by way of the reference if no round has both."""
        if self.ratios(setting, self.default):
            return self.ratio(setting, self.default)
        return self.ratio(setting, self.reference) * self.ratio(self.reference, self.default).median

    def verdict(self, setting: Setting) -> str:
        """Return the verdict on a setting in a few words."""
        if setting == self.chosen:
            return "chosen"
        assert self.chosen is not None
        score = self.ratio_to_default(setting).median / self.ratio_to_default(self.chosen).median
        return "slower" if score < 1 - ALIKE else "as fast" if score <= 1 + ALIKE else "not steadily faster"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        assert self.chosen is not None
        rows = [
            {
                **asdict(setting),
                "samples_per_second": asdict(self.speed(setting)),
                "against_default": asdict(self.ratio_to_default(setting)),
                "data_share": self.data_share(setting),
                "verdict": self.verdict(setting),
                "turns": [
                    {"round": number, **asdict(trials[setting])}
                    for number, trials in enumerate(self.rounds)
                    if setting in trials
                ],
            }
            for setting in self.settings
        ]
        choice = {"choice": asdict(self.chosen), "default": asdict(self.default), "reason": self.reason}
        return {**choice, "turns": self.trial_count, "settings": rows}


def search(measure: Measure, settings: Sequence[Setting], default: Setting) -> SearchResult:
    """Search the fastest of `settings` and `default`; `measure` has one trial of a setting."""
    first = {default: measure(default)}
    result = SearchResult(default, [first])
    if not default.workers and first[default].data_share <= SMALL:
        result.rounds.append({default: measure(default)})
        if result.data_share(default) <= SMALL:
            result.chosen = default
            result.reason = "batches are ready before they are needed, so no other setting can be faster"
            return result
    best = _climb(measure, settings, first)
    _final(measure, result, _finalists(settings, first, best), best)
    result.chosen = _fastest(result, best)
    return result


def _climb(measure: Measure, settings: Sequence[Setting], trials: dict[Setting, Timing]) -> Setting:
    """Double the number of workers while that pays; return the fastest setting."""
    shortest = min(setting.prefetch for setting in settings)
    ladder = sorted({setting for setting in settings if setting.prefetch == shortest or not setting.workers})
    best, failures, last = ladder[0], 0, -1
    for setting in ladder:
        if setting.workers < 2 * last:
            continue
        last = setting.workers
        if setting not in trials:
            trials[setting] = measure(setting)
        pays = trials[setting].samples_per_second > _PAYS * trials[best].samples_per_second
        best, failures = (setting, 0) if pays or setting == best else (best, failures + 1)
        share = trials[setting].data_share
        # One worker is often slower than none: it adds the transfer of batches and loads no two at once.
        is_patient = share > _MUCH or not best.workers
        if share <= SMALL or failures == (3 if is_patient else 2):
            break
    return max(trials, key=lambda setting: trials[setting].samples_per_second)


def _finalists(settings: Sequence[Setting], trials: dict[Setting, Timing], best: Setting) -> list[Setting]:
    """Return the best setting, its neighbors without a trial and settings of similar speed, the most likely first."""
    speeds = {setting: timing.samples_per_second for setting, timing in trials.items()}
    same_prefetch = sorted(s for s in settings if s.prefetch == best.prefetch)
    more = [s for s in same_prefetch if s.workers > best.workers][:1]
    fewer = [s for s in same_prefetch if s.workers < best.workers][-1:]
    more_prefetch = [s for s in settings if s.workers == best.workers and s != best][:1]
    if trials[best].data_share <= SMALL:  # only fewer workers can gain
        more = more_prefetch = []
    similar = sorted((s for s in speeds if speeds[s] > _FAR * speeds[best] and s != best), key=lambda s: -speeds[s])
    candidates = dict.fromkeys([best, *similar[:1], *more, *fewer, *more_prefetch, *similar[1:]])
    return [s for s in candidates if s not in speeds or speeds[s] > _FAR * speeds[best]]


def _final(measure: Measure, result: SearchResult, settings: list[Setting], best: Setting) -> None:
    """Add rounds of fewer and fewer settings, with `best` in all of them; more rounds if trials differ."""
    for number, (count, near) in enumerate(zip(_FINALISTS, _NEAR, strict=True)):
        if number:
            noise = _noise(result, best)
            scores = {setting: result.ratio(setting, best, slice(1, None)).median for setting in settings}
            settings = sorted(scores, key=lambda setting: -scores[setting])
            settings = [setting for setting in settings if scores[setting] >= (near - noise) * scores[settings[0]]]
            if number >= _ENOUGH and noise < _STEADY:
                return
        settings = settings[:count]
        if settings == [best]:
            return
        order = sorted({*settings, best}, reverse=number % 2 == 0)
        result.rounds.append({setting: measure(setting) for setting in order})


def _noise(result: SearchResult, best: Setting) -> float:
    """Return the typical relative difference of a ratio between rounds."""
    differences = []
    for setting in result.settings:
        ratios = result.ratios(setting, best)
        if setting != best and len(ratios) > 1:
            differences.append((max(ratios) - min(ratios)) / (max(ratios) + min(ratios)))
    return min(_MAX_NOISE, statistics.median(differences)) if differences else 0.0


def _fastest(result: SearchResult, best: Setting) -> Setting:
    """Return the fastest setting of the last round: earlier ones had fewer trials, and may have been lucky."""
    final = slice(1, None) if len(result.rounds) > 1 else slice(None)
    scores = {setting: result.ratio(setting, best, final).median for setting in result.rounds[-1]}
    alike = [setting for setting, score in scores.items() if score >= (1 - ALIKE) * max(scores.values())]
    return result.default if result.default in alike else min(alike)
