"""The frames of `pagekv top`, drawn with rich: rates, blocks, requests."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagekv.client.cli.keypress import Keys
from pagekv.client.cli.terminal import milliseconds, printable
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError
from pagekv.client.types import ModelInfo, RequestInfo, RequestList, Stats

# Number of values that a spark line shows.
SPARKS = 24
# Requests to ask for: more than fit on most screens.
REQUESTS = 200
_LEVELS = "▁▂▃▄▅▆▇█"
# Lines of a frame besides the requests: title, rates, blocks and the lines between them.
_OTHER_LINES = 13
_ENDLESS = 10_000
# Least widths with room for spark lines, and for totals beside them.
_NARROW, _WIDE = 56, 80
# Columns of the table of requests besides id and state, those that are left out below the width _TABLE, and that width.
_COLUMNS, _LEAST, _TABLE = ("prompt", "cached", "output", "blocks", "preempted"), ("cached", "preempted"), 72
# Colours of the states, as on the live page; they differ in lightness too.
_FREE, _CACHED, _HELD = "grey35", "steel_blue", "sky_blue2"


@dataclass(frozen=True, slots=True)
class Look:
    """The manager's state at `at`, in seconds of a monotonic clock."""

    at: float
    stats: Stats
    requests: RequestList


class TopRates(NamedTuple):
    """Rates between two states; None if nothing was counted."""

    hit_rate: float | None
    usage: float | None
    step_s: float | None
    tokens_per_s: float | None


def rates_between(before: Look | None, look: Look) -> TopRates:
    """The rates since `before`. Without `before`, or if it is from another manager (it has more steps): shares since
    the manager started, and no token rate.
    """
    now = look.stats
    if before is not None and now.steps_total < before.stats.steps_total:
        before = None

    def grown(name: str) -> int:
        total: int = getattr(now, name)
        return total - (getattr(before.stats, name) if before is not None else 0)

    return TopRates(
        _share(grown("cached_tokens_total"), grown("prompt_tokens_total")),
        now.kv_usage,
        _share(grown("executor_busy_us_total") / 1e6, grown("steps_total")),
        None if before is None else _share(grown("generated_tokens_total"), look.at - before.at),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def spark(values: Sequence[float | None], top: float | None = None) -> str:
    """A line of bars. The tallest bar stands for `top` (the highest value if None), a space for a missing value."""
    highest = top if top is not None else max((value for value in values if value is not None), default=0.0)
    if highest <= 0:
        return "".join(" " if value is None else _LEVELS[0] for value in values)
    last = len(_LEVELS) - 1
    return "".join(" " if value is None else _LEVELS[min(last, int(value / highest * last + 0.5))] for value in values)


@dataclass(frozen=True, slots=True)
class TopFrame:
    """One frame. Its width and height are those of the console on which it is printed."""

    target: str
    info: ModelInfo | None
    look: Look | None
    # In order of time, the latest last.
    rates: Sequence[TopRates]
    problem: str = ""
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._title()
        if self.look is None:
            return
        stats, width = self.look.stats, options.max_width
        yield Text()
        yield self._rate_table(stats, width)
        yield Text()
        yield from _pool_lines(stats, width)
        yield Text()
        height = options.height or (console.height if console.is_terminal else _ENDLESS)
        room = height - _OTHER_LINES - (2 if stats.num_host_blocks else 0) - bool(stats.executor_rank_us)
        # A screen with few lines shows a request instead of the footer.
        has_footer = bool(self.footer) and room > 2
        yield from self._requests(stats, self.look.requests, max(1, room - 2 if has_footer else room), width)
        if has_footer:
            yield Text()
            yield Text(self.footer, "dim", no_wrap=True, overflow="ellipsis")

    def _title(self) -> Text:
        title = Text.assemble(("PageKV", "bold"), f"  {self.target}", no_wrap=True, overflow="ellipsis")
        if self.info is not None:
            title.append(printable(f"  {self.info.model_id or 'no model'} on {self.info.backend}"), "dim")
        if self.problem:
            title.append(printable(f"  {self.problem}"), "bold red")
        elif self.look is not None and not self.look.stats.executor_attached:
            title.append("  no executor", "bold red")
        return title

    def _rate_table(self, stats: Stats, width: int) -> Table:
        hits, usage, step_s, tokens = zip(*self.rates, strict=True)
        table = Table.grid(padding=(0, 2))
        # Without active blocks there is no utilisation to show.
        filled = _percent(stats.utilization if stats.active_blocks else None)
        rows = [
            ("prefix hit rate", _percent(_latest(hits)), spark(hits, 1.0), f"{stats.prefix_hit_rate:.0%} in all"),
            ("blocks in use", _percent(_latest(usage)), spark(usage, 1.0), f"{filled} of their slots filled"),
            ("step time", milliseconds(_latest(step_s)), spark(step_s), f"{stats.steps_total} steps"),
            ("tokens/s", _whole(_latest(tokens)), spark(tokens), f"{stats.generated_tokens_total} generated"),
        ]
        if ranks := stats.executor_rank_us:
            # One line, whatever the number of ranks: a step waits for the slowest rank.
            slowest = max(range(len(ranks)), key=ranks.__getitem__)
            skew = milliseconds((max(ranks) - min(ranks)) / 1e6)
            which = f"rank {slowest}, skew {skew}"
            rows.append(("slowest rank", milliseconds(max(ranks) / 1e6), which, f"of {len(ranks)} ranks"))
        for name, value, drawn, beside in rows:
            cells = [Text(name, "dim"), Text(value, "bold", justify="right")]
            cells += [Text(drawn.rjust(SPARKS), _HELD)] if width >= _NARROW else []
            cells += [Text(beside, "dim")] if width >= _WIDE else []
            table.add_row(*cells)
        return table

    def _requests(self, stats: Stats, listed: RequestList, room: int, width: int) -> RenderResult:
        so_far = f"; {stats.requests_total} requests so far, {stats.preemptions_total} preemptions"
        yield Text.assemble(
            ("Requests", "bold"),
            (f"  {stats.running_sequences} sequences running, {stats.waiting_sequences} waiting", "dim"),
            (so_far if width >= _WIDE else "", "dim"),
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip  # several entries a line: one each would fill a screen
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
        # A narrow screen leaves out the least important columns, and the id gets the remaining width.
        shown = [name for name in _COLUMNS if width >= _TABLE or name not in _LEAST]
        others = sum(len(name) + 2 for name in ("waiting", *shown))
        table.add_column("id", no_wrap=True, overflow="ellipsis", max_width=max(5, min(32, width - others - 2)))
        table.add_column("state", no_wrap=True)
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        for request in listed.requests[:room]:
            cells = dict(zip(_COLUMNS, _row(request), strict=True))
            style = "" if request.state == "running" else "dim"
            request_id = Text(printable(request.request_id))
            table.add_row(request_id, request.state, *(cells[name] for name in shown), style=style)
        if listed.requests:
            yield table
        if listed.total > room:
            yield Text(f"and {listed.total - min(room, len(listed.requests))} more", "dim")


def _row(request: RequestInfo) -> list[str]:
    """The cells of _COLUMNS."""
    return [
        str(request.prompt_tokens), str(request.cached_tokens),
        str(request.generated_tokens), str(request.num_blocks), str(request.preemptions or ""),
    ]  # fmt: skip  # several entries a line: one each would fill a screen


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _pool_lines(stats: Stats, width: int) -> RenderResult:
    cached, free = stats.cached_free_blocks, stats.free_blocks - stats.cached_free_blocks
    parts = [("in use", stats.active_blocks, _HELD), ("cached", cached, _CACHED), ("free", free, _FREE)]
    pinned = f"{stats.pinned_blocks} of these pinned; " if stats.pinned_blocks else ""
    evicted = f"{pinned}{stats.evicted_blocks_total} evicted so far"
    yield from _pool("Device blocks", stats.num_device_blocks, parts, evicted, width)
    if stats.num_host_blocks:
        # Held blocks may be cached too.
        cached = min(stats.host_cached_blocks, stats.num_host_blocks - stats.host_held_blocks)
        rest = stats.num_host_blocks - stats.host_held_blocks - cached
        parts = [("held", stats.host_held_blocks, _HELD), ("cached", cached, _CACHED), ("free", rest, _FREE)]
        moved = f"{stats.swapped_out_blocks_total} swapped out, {stats.swapped_in_blocks_total} in"
        yield from _pool("Host blocks", stats.num_host_blocks, parts, moved, width)


def _pool(name: str, total: int, parts: list[tuple[str, int, str]], beside: str, width: int) -> RenderResult:
    """One pool: a line of numbers, and a bar."""
    gap = "  " if width >= _NARROW else " "
    line = Text.assemble((name if width >= _NARROW else name.split()[0], "bold"), f"{gap}{total}: ", no_wrap=True)
    for word, number, style in parts:
        line.append("■ " if line.plain.endswith(" ") else f"{gap}■ ", style).append(f"{number} {word}")
    yield line.append(f"  {beside}" if width >= _WIDE else "", "dim")
    bar, drawn, so_far = Text(no_wrap=True), 0, 0
    for _, number, style in parts:
        so_far += number
        upto = round(width * so_far / max(total, 1))
        bar.append("█" * (upto - drawn), style)
        drawn = upto
    yield bar


def watch(watcher: TopWatcher, console: Console, every_s: float) -> None:
    """Shows a frame every so many seconds, until q or KeyboardInterrupt."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # Raises KeyboardInterrupt like Ctrl-C, so that screen and keyboard are restored.
        signal.signal(signum, signal.default_int_handler)
    with Keys() as keys:
        watcher.footer = "q or Ctrl-C ends this" if keys.are_read else "Ctrl-C ends this"
        # Before the screen is changed: if the first frame fails, the command ends with an ordinary error.
        first = watcher.frame(fail=True)
        live = Live(first, console=console, screen=True, auto_refresh=False)
        try:
            # Not with `with`: an interrupt while it draws the first frame would not restore the screen.
            live.start(refresh=True)
            while not keys.wait_for(b"qQ", every_s):
                live.update(watcher.frame(), refresh=True)
        finally:
            live.stop()


class TopWatcher:
    """Asks the manager for frames, and keeps the counters from which rates are computed."""

    def __init__(self, client: PageKVClient, target: str) -> None:
        self._client, self._target = client, target
        self._rates: deque[TopRates] = deque(maxlen=SPARKS)
        self._look: Look | None = None
        self._info: ModelInfo | None = None
        # Last line of every frame.
        self.footer = ""

    def frame(self, *, fail: bool = False) -> TopFrame:
        """A frame with the present state. If the manager does not answer, the frame says so, or with `fail` raises
        PageKVError.
        """
        problem = ""
        try:
            self._info = self._client.model_info()
            look = Look(time.monotonic(), self._client.stats(), self._client.list_requests(REQUESTS))
            self._rates.append(rates_between(self._look, look))
            self._look = look
        except PageKVError as error:
            if fail:
                raise
            problem = f"trying again: {error}"
        return TopFrame(self._target, self._info, self._look, self._rates, problem, self.footer)
