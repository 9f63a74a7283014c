"""How a step's threads compute it: how many there are, and whether they spin while they wait for one another.

By how long steps have taken; no clock and no torch here. On a machine of one's own all threads, spinning, are best for
all but small steps. Beside other busy processes a thread that spins holds the core that the thread it waits for needs,
and a step takes several times as long as with threads that sleep, or with one thread. So now and then a step is
computed in another way, the rival, and its time is compared with that of the step before it. Evidence is the sum of
logarithms of these ratios, each of which counts up to a bound; as soon as it speaks for the present way it is dropped:
a cumulative sum test (Page, Biometrika 41, 1954), which one slow step does not mislead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pagekv.common.logs import Log

log = Log(__name__)

# Of the time of steps, the share that rivals may cost: of the first way, and of others, beside which a better one may
# have become possible.
FIRST_SHARE, OTHER_SHARE = 0.01, 0.03
# Seconds of that share at the start, which it may also be overdrawn by, and at most; one trial takes at most so many
# times a step of it.
START_CREDIT_S, MOST_CREDIT_S, MOST_COST = 0.1, 1.0, 3.0
# Steps between two trials at least: at first, later, and where disturbance was the reason for trials that were in vain.
FIRST_PAUSE, PAUSE, LONGEST_PAUSE = 3, 16, 64
# Steps that on average take so many times what undisturbed ones do are a sign of a neighbour: rivals are tried whatever
# they cost. In the average a new step has this weight and counts as so many undisturbed ones at most; what those take
# is a quantile, followed in so large parts of itself.
DISTURBED, WEIGHT, MOST_DISTURBED, QUANTILE, PART = 1.7, 0.2, 3.0, 0.1, 0.02
# Evidence, in logarithms: by how much a rival must be faster unless it is the first way, how much one pair of steps can
# count, and how much is enough. Each switch asks for more before the next, until steps of CALM_S seconds have passed.
MARGIN, MOST_EVIDENCE, ENOUGH, UNREST, CALM_S = 0.05, math.log(2), 1.2, 0.5, 5.0
# Pairs of steps after which a rival that is hardly better is left, or taken if it is the first way.
MOST_PAIRS = 12
# Steps over less context are of one kind.
SMALL_CONTEXT = 1024
# A kind of steps that was not met for so many has no time to compare with.
STALE = 4
# Numbers of rows and ways that are remembered.
MOST_SEEN = 4096
# Seconds of steps between two lines of the log.
LOG_EVERY_S = 10.0


class Way(NamedTuple):
    """Threads of a step, at least 1; `spins`: for a while at each barrier before they sleep."""

    threads: int
    spins: bool


def ways(most: int, *, can_sleep: bool) -> list[Way]:
    """Ways to choose from on so many cores, the one for a quiet machine first. `can_sleep`: waiting can be changed."""
    counts = sorted({1, most} if most < 4 else {1, most // 2, most - 1, most}, reverse=True)
    asleep = [Way(count, False) for count in counts if count > 1 and can_sleep]
    awake = [Way(count, True) for count in counts if count == 1 or not can_sleep]
    return list(dict.fromkeys([Way(most, True), *asleep, *awake]))


@dataclass(slots=True)
class _Kind:
    """Steps of about as many tokens over about as much context, and how they are computed."""

    way: Way
    # Steps in this way since a rival was tried, and how many there must be before the next.
    since: int = 0
    pause: int = FIRST_PAUSE
    # Seconds in this way: on average, undisturbed, and of the last step. 0: before the first.
    average: float = 0.0
    undisturbed: float = 0.0
    last: float = 0.0
    # Tried in turns with the way. Evidence below 0 speaks for the rival; `chances` is how many more times it may speak
    # against the rival until the trial ends.
    rival: Way | None = None
    rivals_turn: bool = False
    evidence: float = 0.0
    chances: int = 0
    num_pairs: int = 0
    num_trials: int = 0
    unrest: float = 0.0
    # Number of the last step of this kind.
    met: int = 0

    def begin(self, way: Way, seconds: float) -> None:
        """Computes in this way from here on, a step of which took so long."""
        self.way, self.since, self.pause, self.rival = way, 0, PAUSE, None
        self.average = self.undisturbed = self.last = seconds

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
    """Says before each step how it is computed, and is told afterwards how long that took. Belongs to one thread."""

    def __init__(self, choice: list[Way]) -> None:
        """`choice`: at least one way; the first is the one for a quiet machine."""
        self._ways = choice
        # By bit lengths of tokens and of context.
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._size = 0
        self._kind = _Kind(choice[0])
        self._step = (0, choice[0])
        self._num_steps = 0
        # Tokens and ways of steps that there were; how many in a row were the first of theirs.
        self._seen: set[tuple[int, Way]] = set()
        self._num_firsts = 0
        self._credit = START_CREDIT_S
        # Seconds of all steps; when the log gets its next line, and changes that it was not told of.
        self._seconds = self._log_at = 0.0
        self._untold = 0

    def choose(self, tokens: int, context: int) -> Way:
        """For the step that computes `tokens` and reads `context` positions, of all its sequences together."""
        size = tokens.bit_length()
        key = (size, max(context, SMALL_CONTEXT).bit_length())
        kind = self._kinds.get(key)
        if kind is None:
            # Steps of nearly that size have found out already.
            kind = self._kinds[key] = _Kind(self._kind.way if abs(size - self._size) <= 1 else self._ways[0])
        self._num_steps += 1
        tries = kind.rivals_turn and self._num_steps - kind.met <= STALE
        way = kind.rival if tries and kind.rival is not None else kind.way
        self._kind, self._size, self._step = kind, size, (tokens, way)
        return way

    def took(self, seconds: float) -> None:
        """Tells the seconds of the step that `choose` was asked about last."""
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
        """Whether oneDNN has compiled for this number of rows and threads, which takes as long as a step does."""
        if self._step in self._seen:
            self._num_firsts = 0
            return False
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen.add(self._step)
        # Where each step has another number of rows, every third counts nevertheless.
        self._num_firsts = (self._num_firsts + 1) % 3
        return self._num_firsts > 0

    def _add_own(self, kind: _Kind, seconds: float) -> None:
        share = FIRST_SHARE if kind.way == self._ways[0] else OTHER_SHARE
        self._credit = min(MOST_CREDIT_S, self._credit + share * seconds)
        kind.unrest = max(0.0, kind.unrest - seconds / CALM_S)
        kind.add(seconds)
        if kind.rival is not None:
            kind.rivals_turn = True
            return
        if kind.since < kind.pause:
            return
        first, *others = [way for way in self._ways if way != kind.way]
        # Beside a neighbour the first way is the last to look to.
        rivals = others if others and kind.disturbed and first == self._ways[0] else [first, *others]
        rival = rivals[kind.num_trials % len(rivals)]
        if kind.disturbed or self._credit >= seconds * max(1.0, kind.way.threads / rival.threads - 1):
            kind.rival, kind.rivals_turn, kind.evidence, kind.num_pairs = rival, True, 0.0, 0
            # Beside a neighbour one slow step of the rival may be chance.
            kind.chances = 2 if kind.disturbed else 1
            kind.num_trials += 1

    def _add_rival(self, kind: _Kind, rival: Way, seconds: float) -> None:
        margin = 0.0 if rival == self._ways[0] else MARGIN
        # No step takes less than a nanosecond.
        ratio = math.log(max(seconds, 1e-9) / max(kind.last, 1e-9)) + margin
        kind.evidence += max(-MOST_EVIDENCE, min(MOST_EVIDENCE, ratio))
        kind.rivals_turn = False
        kind.num_pairs += 1
        if kind.evidence >= 0:
            kind.evidence = 0.0
            kind.chances -= 1
        long = kind.num_pairs >= MOST_PAIRS
        if not kind.chances or (long and rival != self._ways[0]):
            # Disturbance that no rival helps against is no reason again and again.
            kind.pause = min(max(PAUSE, 2 * kind.pause), LONGEST_PAUSE) if kind.disturbed else PAUSE
            kind.rival, kind.since = None, 0
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
