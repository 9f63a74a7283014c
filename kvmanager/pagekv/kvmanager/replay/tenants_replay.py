"""A quiet tenant beside busy ones, in timed mode: its waits and hits alone, first come first served, and with tenants.

The first tenant is quiet: it has one of each `QUIET_SHARE * tenants` conversations, and the others have the rest in
turn. So it asks for a quarter of an equal share, and the trace alone decides which requests are its own. There are four
cases for each pool:

    alone   only the quiet tenant's requests
    one     all requests belong to one tenant, first come first served
    fair    tenants of equal weights
    floor   the same, and half of the pool is the quiet tenant's floor

As in the manager, tenants share no prefix, not even a system prompt; in the case `one` all requests share prefixes.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.replay.options import ReplayOptions
from pagekv.kvmanager.replay.report import aligned, duration
from pagekv.kvmanager.replay.timed_mode import TimedReplay, enough_blocks, fits
from pagekv.kvmanager.replay.trace import TraceError, TraceRecord
from pagekv.kvmanager.request.tenant import Tenant

QUIET_SHARE = 4
CASES = ("alone", "one", "fair", "floor")


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """Figures of the requests of one or more tenants. Hits are counted at a request's first admission."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    # From arrival to first token, in seconds of simulated time, interpolated linearly; None without requests.
    ttft_p50_s: float | None
    ttft_p95_s: float | None

    @property
    def hit_rate(self) -> float:
        """Hit tokens / prompt tokens, 0 to 1."""
        return self.hit_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class TenantRow:
    """The figures of one case, for one policy and capacity."""

    policy: str
    blocks: int
    unbounded: bool
    case: str
    # Others evict none of the quiet tenant's cached blocks while it has no more blocks, held and cached, than these.
    floor: int
    # Requests that are left out of every case, because they need more blocks than are left beside the floor.
    refused: int
    quiet: TenantFigures
    others: TenantFigures
    preemptions: int
    # A digest that is equal for replays with the same decisions in every step.
    decisions: str
    # Seconds that the replay took on this machine.
    wall_s: float


def conversations(records: Sequence[TraceRecord]) -> list[int]:
    """The conversation of each record, numbered in order. Records of one conversation begin with the same hash id,
    after leaving out ids of a system prompt, which more than half of the records have. A record without ids is a
    conversation of its own.
    """
    counts = Counter(each for record in records for each in set(record.hash_ids))
    numbers: dict[tuple[int, ...], int] = {}
    found = []
    for index, record in enumerate(records):
        own = [each for each in record.hash_ids if 2 * counts[each] <= len(records)]
        key = (own[0],) if own else (-1, index)
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def owners(records: Sequence[TraceRecord], tenants: int) -> list[int]:
    """The tenant of each record, 1 to `tenants`; 1 is the quiet one. Raises TraceError if a tenant has no record."""
    period = QUIET_SHARE * tenants
    found = []
    for number in conversations(records):
        turn = number % period
        found.append(1 if turn == 0 else 2 + (turn - 1) % (tenants - 1))
    if len(set(found)) < tenants:
        raise TraceError(f"--tenants {tenants}: the trace has too few conversations for this number")
    return found


def replay_tenants(
    records: Sequence[TraceRecord],
    options: ReplayOptions,
    policy: str,
    num_blocks: int | None,
    tenants: int,
    progress: Callable[[int], None],
) -> list[TenantRow]:
    """A row for each case. `num_blocks` None: unbounded, without the case `floor`. `progress` gets the number of
    arrived requests, from the beginning for each case. Raises TraceError.
    """
    in_order = sorted(records, key=lambda record: record.arrival_s)
    numbers = owners(in_order, tenants)
    unbounded = num_blocks is None
    if num_blocks is None:
        of_tenant: dict[int, list[TraceRecord]] = {}
        for record, number in zip(in_order, numbers, strict=True):
            of_tenant.setdefault(number, []).append(record)
        num_blocks = sum(enough_blocks(own, options) for own in of_tenant.values())
    floor = 0 if unbounded else num_blocks // 2
    # Every case replays the same requests.
    kept = [at for at, record in enumerate(in_order) if fits(record, num_blocks - floor, options.block_size)]
    fitting, owned = [in_order[at] for at in kept], [numbers[at] for at in kept]
    if 1 not in owned:
        raise TraceError(f"--blocks {num_blocks}: no request of the quiet tenant fits beside the floor")
    rows = []
    for case in CASES[:-1] if unbounded else CASES:
        begun = time.perf_counter()
        pairs = zip(fitting, owned, strict=True)
        chosen = [(record, number) for record, number in pairs if number == 1 or case != "alone"]
        each = [record for record, _ in chosen]
        split = [Tenant(str(number), number) for _, number in chosen] if case in ("fair", "floor") else []
        replay = TimedReplay(each, options, policy, num_blocks, split)
        if split:
            weights = dict.fromkeys(range(1, tenants + 1), 1.0)
            replay.scheduler.set_tenants(weights, {1: floor} if case == "floor" else {})
        replay.run(progress)
        quiet = np.array([number == 1 for _, number in chosen], np.bool_)
        row = TenantRow(
            policy=policy,
            blocks=num_blocks,
            unbounded=unbounded,
            case=case,
            floor=floor if case == "floor" else 0,
            refused=len(records) - len(fitting),
            quiet=_figures(replay, each, quiet),
            others=_figures(replay, each, ~quiet),
            preemptions=replay.scheduler.counters.preemptions,
            decisions=replay.decisions.hexdigest(),
            wall_s=time.perf_counter() - begun,
        )
        rows.append(row)
    return rows


def _figures(replay: TimedReplay, records: Sequence[TraceRecord], chosen: NDArray[np.bool_]) -> TenantFigures:
    """Figures of the chosen requests, [n]."""
    waits: array[float] = replay.executor.ttft_s
    of = chosen[np.frombuffer(replay.executor.ttft_requests, np.int64)] if waits else np.zeros(0, np.bool_)
    seconds = np.frombuffer(waits)[of] if waits else np.zeros(0)
    p50, p95 = map(float, np.percentile(seconds, (50, 95))) if len(seconds) else (None, None)
    lengths = np.array([record.input_length for record in records], np.int64)
    return TenantFigures(
        requests=int(chosen.sum()),
        prompt_tokens=int(lengths[chosen].sum()),
        hit_tokens=int(replay.cached_tokens[chosen].sum()),
        ttft_p50_s=p50,
        ttft_p95_s=p95,
    )


def tenants_as_json(trace: str, options: ReplayOptions, tenants: int, rows: Sequence[TenantRow]) -> dict[str, Any]:
    """The whole report as JSON types; times in seconds, rates from 0 to 1."""
    shown = []
    for row in rows:
        value = asdict(row)
        for name, figures in (("quiet", row.quiet), ("others", row.others)):
            value[name]["hit_rate"] = figures.hit_rate
        shown.append(value)
    head = {"trace": trace, "mode": "timed", "options": asdict(options), "tenants": tenants}
    return {**head, "quiet_has_one_conversation_of": QUIET_SHARE * tenants, "rows": shown}


def tenants_as_table(tenants: int, rows: Sequence[TenantRow]) -> str:
    """The rule that gave requests to tenants, and a table of the quiet tenant's figures."""
    alone = rows[0]
    head = (
        f"{tenants} tenants: the first has one conversation of each {QUIET_SHARE * tenants} and is quiet, the others "
        f"have the rest in turns ({alone.quiet.requests:,} requests and {rows[1].others.requests:,})\n\n"
    )
    header = ["policy", "blocks", "quiet tenant", "hits/tokens", "TTFT p50", "/ alone", "p95", "/ alone"]
    lines = [[*header, "others: hits", "p50", "preempted", "wall"]]
    names = {"alone": "alone", "one": "beside, as one tenant", "fair": "fair shares", "floor": "and a floor"}
    for row in rows:
        if row.case == CASES[0]:
            alone = row
        quiet, first, others = row.quiet, alone.quiet, row.others
        lines.append([
            row.policy,
            f"{row.blocks:,}" + (" (all)" if row.unbounded else ""),
            names[row.case] + (f" of {row.floor:,}" if row.floor else ""),
            f"{quiet.hit_rate:.2%}",
            duration(quiet.ttft_p50_s),
            _ratio(quiet.ttft_p50_s, first.ttft_p50_s),
            duration(quiet.ttft_p95_s),
            _ratio(quiet.ttft_p95_s, first.ttft_p95_s),
            f"{others.hit_rate:.2%}" if others.requests else "-",
            duration(others.ttft_p50_s),
            f"{row.preemptions:,}",
            f"{row.wall_s:.1f} s",
        ])  # fmt: skip  # one cell a line
    table = head + aligned(lines)
    if any(row.refused for row in rows):
        table += "\nleft out of every case: requests that need more blocks than the floor leaves"
    return table


def _ratio(seconds: float | None, alone: float | None) -> str:
    return f"{seconds / alone:,.2f}" if seconds is not None and alone else "-"
