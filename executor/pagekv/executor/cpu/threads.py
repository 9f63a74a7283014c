"""Chooses how many threads compute a step, and whether they spin while they wait for one another.

The choice follows from the times that steps took; there is no clock and no torch in this module. On a quiet machine all
threads, spinning, are best except for small steps, during which manager and client need a core. Beside other busy
processes, a spinning thread holds the core that the thread it waits for needs; then a step takes several times as long
as with sleeping threads, or with one thread.

So now and then a step is computed in another way, the rival, and its time is compared with the time of the step before.
The evidence is the sum of the logarithms of these ratios, each of them bounded, and is reset as soon as it favours the
present way. This is a cumulative sum test (Page, Biometrika 41, 1954), which one slow step does not mislead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pagekv.common.logs import Log

log = Log(__name__)

# The share of step time that trials of rivals may cost: while a kind's first way is in use, and while another way is in
# use, since the first may have become the best again.
FIRST_SHARE, OTHER_SHARE = 0.01, 0.03
# The credit for trials, in seconds, earned by that share: at the start, which is also the most that it may be
# overdrawn, and at most. A step of a trial is charged at most MOST_COST times a step in the present way.
START_CREDIT_S, MOST_CREDIT_S, MOST_COST = 0.1, 1.0, 10.0
# Least number of steps between two trials: at first, later, and at most, after trials that disturbance caused and that
# found nothing better.
FIRST_PAUSE, PAUSE, LONGEST_PAUSE = 3, 16, 64
# If steps on average take more than DISTURBED times as long as undisturbed ones, another process disturbs them, and
# rivals are tried at any cost. In the average a new step has the weight WEIGHT and counts as at most MOST_DISTURBED
# undisturbed ones. The time of an undisturbed step is estimated as a QUANTILE, which moves by PART of itself.
DISTURBED, WEIGHT, MOST_DISTURBED, QUANTILE, PART = 1.7, 0.2, 3.0, 0.1, 0.02
# Evidence, in logarithms: MARGIN by which a rival must be faster unless it is the first way, the most that one pair of
# steps counts, and the amount that is enough to switch. Each switch raises that amount by UNREST, which decays within
# CALM_S seconds of steps.
MARGIN, MOST_EVIDENCE, ENOUGH, UNREST, CALM_S = 0.05, math.log(2), 1.2, 0.5, 5.0
# A clear loss: the rival took more than CLEAR times as long. After one, the rival misses 1 turn; after two in a row 3
# turns; after more 7. While other processes disturb, it misses none. On a quiet machine, one thread takes nearly twice
# as long as two.
CLEAR, MISSED_TURNS = 1.4, (0, 1, 3, 7)
# Pairs of steps after which a rival that is hardly better is dropped, or adopted if it is the first way.
MOST_PAIRS = 12
# All steps over less context than this are of one kind.
SMALL_CONTEXT = 1024
# If a kind of steps did not occur for more than this many steps, its last time is too old to compare with.
STALE = 4
# How many pairs of a number of tokens and a way are remembered.
MOST_SEEN = 4096
# A step is small if one thread is estimated to read its bytes within SMALL_S and to do its operations within SMALL_S.
# The rates are about half of those that one thread of an AMD EPYC (family 25, model 17) reaches.
SMALL_S, BYTES_PER_S, OPERATIONS_PER_S = 0.003, 10e9, 50e9
# Seconds of steps between two lines of the log about changes.
LOG_EVERY_S = 10.0


class Way(NamedTuple):
    """How a step is computed: `threads`, at least 1; `spins`: they spin for a while at each barrier before they
    sleep.
    """

    threads: int
    spins: bool


def ways(most: int, *, can_sleep: bool) -> list[Way]:
    """The ways to choose from with at most `most` threads, the best one for a quiet machine first. `can_sleep`:
    threads can be made to sleep.
    """
    counts = sorted({1, most} if most < 4 else {1, most // 2, most - 1, most}, reverse=True)
    asleep = [Way(count, False) for count in counts if count > 1 and can_sleep]
    awake = [Way(count, True) for count in counts if count == 1 or not can_sleep]
    return list(dict.fromkeys([Way(most, True), *asleep, *awake]))


@dataclass(frozen=True, slots=True)
class SmallSteps:
    """The small steps of a model: so short that one thread is the best way, because manager and client need a core as
    well. `weight_bytes`: of all weights; `token_bytes`: of the keys and values of one token in all layers.
    """

    num_weights: int
    weight_bytes: int
    token_bytes: int

    def include(self, tokens: int, context: int) -> bool:
        """Whether a step of so many tokens over so many positions is small."""
        read = self.weight_bytes + context * self.token_bytes
        return read <= SMALL_S * BYTES_PER_S and 2 * tokens * self.num_weights <= SMALL_S * OPERATIONS_PER_S


@dataclass(slots=True)
class _Kind:
    """A class of steps with about the same number of tokens and context length, and how they are computed: `way`. On a
    quiet machine `first` is the best way.
    """

    first: Way
    way: Way
    # Steps in this way since the last trial of a rival, and the number needed before the next trial.
    since: int = 0
    pause: int = FIRST_PAUSE
    # Seconds of a step in this way: on average, undisturbed, and of the last step. 0 before the first step.
    average: float = 0.0
    undisturbed: float = 0.0
    last: float = 0.0
    # The rival takes turns with the present way. Evidence below 0 favours the rival; after `chances` more times that
    # it does not, the trial ends.
    rival: Way | None = None
    rivals_turn: bool = False
    evidence: float = 0.0
    chances: int = 0
    num_pairs: int = 0
    num_trials: int = 0
    unrest: float = 0.0
    # By rival: clear losses in a row, and turns that it still misses.
    losses: dict[Way, int] = field(default_factory=dict)
    missing: dict[Way, int] = field(default_factory=dict)
    # The number of the last step of this kind.
    met: int = 0

    def begin(self, way: Way, seconds: float) -> None:
        """Switches to another way, in which the last step took `seconds`."""
        self.way, self.since, self.pause, self.rival = way, 0, PAUSE, None
        self.average = self.undisturbed = self.last = seconds
        self.losses.clear()
        self.missing.clear()

    def misses(self, rival: Way) -> bool:
        """Counts a turn of this rival. Returns whether the rival misses the turn."""
        left = self.missing.get(rival, 0)
        self.missing[rival] = max(0, left - 1)
        return left > 0 and not self.disturbed

    def end_trial(self, rival: Way, ratio: float) -> None:
        """Ends a trial of a rival that was no better; its last step took `ratio` times as long as the present way."""
        # Disturbance that no rival helps against must not cause trials again and again.
        self.pause = min(max(PAUSE, 2 * self.pause), LONGEST_PAUSE) if self.disturbed else PAUSE
        self.rival, self.since = None, 0
        losses = self.losses.get(rival, 0) + 1 if ratio > CLEAR and not self.disturbed else 0
        self.losses[rival], self.missing[rival] = losses, MISSED_TURNS[min(losses, len(MISSED_TURNS) - 1)]

    def add(self, seconds: float) -> None:
        """Counts a step in the present way."""
        if not self.average:
            self.average = self.undisturbed = seconds
        self.average += WEIGHT * (min(seconds, MOST_DISTURBED * self.undisturbed) - self.average)
        self.undisturbed *= 1 + PART * (QUANTILE if seconds > self.undisturbed else QUANTILE - 1)
        self.last = seconds
        self.since += 1

    @property
    def disturbed(self) -> bool:
        return self.average > DISTURBED * self.undisturbed


class WayChooser:
    """Chooses the way of each step before it runs, and is told its time afterwards. Used by one thread."""

    def __init__(self, choice: list[Way], small: SmallSteps | None = None) -> None:
        """`choice`: at least one way, the best one for a quiet machine first; `small`: steps that begin on one thread
        instead.
        """
        self._ways, self._small = choice, small
        self._alone = next((way for way in choice if way.threads == 1), choice[0])
        # By the bit lengths of tokens and of context.
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._size = 0
        self._kind = _Kind(choice[0], choice[0])
        self._step = (0, choice[0])
        self._num_steps = 0
        # Pairs of tokens and way that have occurred; and how many new pairs came in a row, modulo 3.
        self._seen: set[tuple[int, Way]] = set()
        self._num_firsts = 0
        self._credit = START_CREDIT_S
        # Seconds of all steps; the time of the next line of the log; changes since the last line.
        self._seconds = self._log_at = 0.0
        self._untold = 0

    def choose(self, tokens: int, context: int) -> Way:
        """The way of a step that computes `tokens` tokens and reads `context` positions, over all its sequences."""
        size = tokens.bit_length()
        span = max(context, SMALL_CONTEXT).bit_length()
        key = (size, span)
        kind = self._kinds.get(key)
        if kind is None:
            # The most tokens and the least context of this kind.
            small = self._small is not None and self._small.include((1 << size) - 1, 1 << (span - 1))
            first, before = self._alone if small else self._ways[0], self._kind
            # Starts with the way of the previous step if that had nearly the same size.
            alike = abs(size - self._size) <= 1 and before.first == first
            kind = self._kinds[key] = _Kind(first, before.way if alike else first)
            if small:
                # Other processes disturb one thread least of all ways, so others need not be tried soon.
                kind.pause = PAUSE
        self._num_steps += 1
        tries = kind.rivals_turn and self._num_steps - kind.met <= STALE
        way = kind.rival if tries and kind.rival is not None else kind.way
        self._kind, self._size, self._step = kind, size, (tokens, way)
        return way

    def took(self, seconds: float) -> None:
        """Takes the seconds of the step that `choose` was last called for."""
        kind, (_, way) = self._kind, self._step
        self._seconds += seconds
        kind.met = self._num_steps
        if way != kind.way:
            cost = min(max(0.0, seconds - kind.last), MOST_COST * kind.last)
            self._credit = max(-START_CREDIT_S, self._credit - cost)
        if len(self._ways) == 1 or self._is_first():
            return
        if way == kind.way:
            self._add_own(kind, seconds)
        elif kind.rival is not None:
            self._add_rival(kind, kind.rival, seconds)

    def _is_first(self) -> bool:
        """Whether the time of this step does not count because it is the first with these numbers of rows and threads:
        oneDNN then compiles a kernel, which takes as long as a step does.
        """
        if self._step in self._seen:
            self._num_firsts = 0
            return False
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen.add(self._step)
        # If every step has a new number of rows, every third step counts all the same.
        self._num_firsts = (self._num_firsts + 1) % 3
        return self._num_firsts > 0

    def _add_own(self, kind: _Kind, seconds: float) -> None:
        share = FIRST_SHARE if kind.way == kind.first else OTHER_SHARE
        self._credit = min(MOST_CREDIT_S, self._credit + share * seconds)
        kind.unrest = max(0.0, kind.unrest - seconds / CALM_S)
        kind.add(seconds)
        if kind.rival is not None:
            kind.rivals_turn = True
            return
        if kind.since < kind.pause:
            return
        first, *others = [way for way in self._ways if way != kind.way]
        # While other processes disturb, all threads, spinning, are not tried if there are other ways.
        rivals = others if others and kind.disturbed and first == self._ways[0] else [first, *others]
        rival = rivals[kind.num_trials % len(rivals)]
        if kind.misses(rival):
            kind.since, kind.num_trials = 0, kind.num_trials + 1
            return
        if kind.disturbed or self._credit >= seconds * max(1.0, kind.way.threads / rival.threads - 1):
            kind.rival, kind.rivals_turn, kind.evidence, kind.num_pairs = rival, True, 0.0, 0
            # While other processes disturb, one slow step of the rival may be chance.
            kind.chances = 2 if kind.disturbed else 1
            kind.num_trials += 1

    def _add_rival(self, kind: _Kind, rival: Way, seconds: float) -> None:
        margin = 0.0 if rival == kind.first else MARGIN
        # Bounds the logarithm: no step takes less than a nanosecond.
        ratio = max(seconds, 1e-9) / max(kind.last, 1e-9)
        kind.evidence += max(-MOST_EVIDENCE, min(MOST_EVIDENCE, math.log(ratio) + margin))
        kind.rivals_turn = False
        kind.num_pairs += 1
        if kind.evidence >= 0:
            kind.evidence = 0.0
            kind.chances -= 1
        long = kind.num_pairs >= MOST_PAIRS
        if not kind.chances or (long and rival != kind.first):
            kind.end_trial(rival, ratio)
        elif long or kind.evidence <= -ENOUGH - UNREST * kind.unrest:
            self._switch(kind, rival, seconds)

    def _switch(self, kind: _Kind, rival: Way, seconds: float) -> None:
        before, last = kind.way, kind.last
        self._untold += 1
        if self._seconds >= self._log_at:
            log.info(
                "steps are computed in another way",
                tokens=self._step[0],
                threads=rival.threads,
                waiting="spins" if rival.spins else "sleeps",
                step_ms=round(seconds * 1e3, 1),
                threads_before=before.threads,
                waiting_before="spins" if before.spins else "sleeps",
                step_ms_before=round(last * 1e3, 1),
                changes=self._untold,
            )
            self._untold, self._log_at = 0, self._seconds + LOG_EVERY_S
        kind.begin(rival, seconds)
        kind.unrest += 1
