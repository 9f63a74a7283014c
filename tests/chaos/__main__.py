"""`make chaos`: kills, hangs, floods and fights at random moments from a printed seed, and what was lost (nothing).

Exit status 0: every stream that may live on did, with the tokens of the undisturbed run. 1: something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from chaos.faults import FAULTS
from chaos.run import Options, chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=540, help="how long faults are injected [540]")
    parser.add_argument("--seed", type=int, help="which faults and when; drawn and printed unless given")
    parser.add_argument("--backend", choices=("oracle", "cpu"), default="oracle", help="of the executor [oracle]")
    parser.add_argument("--lanes", type=int, default=32, help="clients at once [32]")
    parser.add_argument("--count", type=int, default=0, help="faults to inject at most; 0: as time allows [0]")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which ones, with commas between [all]")
    args = parser.parse_args()
    faults = tuple(args.faults.split(","))
    if unknown := set(faults) - FAULTS.keys():
        parser.error(f"--faults: unknown {', '.join(sorted(unknown))}; known are {', '.join(FAULTS)}")
    if not 0 < args.seconds <= 86400 or args.lanes < 1 or args.count < 0:
        parser.error("--seconds must be above 0 and up to 86400, --lanes at least 1, --count at least 0")
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.lanes} clients, backend {args.backend}, {args.seconds:g} s at most", flush=True)
    begin = time.monotonic()
    account = asyncio.run(chaos(Options(args.seconds, seed, args.backend, args.lanes, faults, args.count)))
    print(f"\n{account.table()}\n\nseed {seed}, {time.monotonic() - begin:.0f} s in all")
    return 1 if account.lost else 0


if __name__ == "__main__":
    sys.exit(main())
