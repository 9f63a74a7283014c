"""`make chaos`: kills, hangs, floods and fights at random moments from a printed seed, and what was lost (nothing).

Exit status 0: every stream that may live on did, with the tokens of the undisturbed run. 1: something was lost, or
fewer faults were injected than --count or --faults asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from chaos.faults import FAULTS, RANK_FAULTS
from chaos.run import Options, chaos

# The time that --count allows for each of them: most take a second, an executor with torch or a hung one some ten.
SECONDS_PER_FAULT = 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"how long faults are injected at most [540; with --count {SECONDS_PER_FAULT} for each fault]",
    )
    parser.add_argument("--seed", type=int, help="which faults and when; drawn and printed unless given")
    parser.add_argument("--backend", choices=("oracle", "cpu"), default="oracle", help="of the executor [oracle]")
    parser.add_argument("--lanes", type=int, default=32, help="clients at once [32]")
    parser.add_argument("--count", type=int, default=0, help="faults to inject, no fewer; 0: as time allows [0]")
    parser.add_argument("--faults", help="which ones, each at least once, with commas between [as they come, of all]")
    parser.add_argument("--tls", action="store_true", help="mutual TLS and a key at every port")
    parser.add_argument("--ranks", type=int, default=1, help="of the executor, which torchrun starts [1]")
    args = parser.parse_args()
    known = FAULTS if args.ranks == 1 else RANK_FAULTS
    named = () if args.faults is None else tuple(dict.fromkeys(args.faults.split(",")))
    faults = named or tuple(known)
    if unknown := set(faults) - known.keys():
        parser.error(f"--faults: unknown {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    if args.seconds is None:
        args.seconds = SECONDS_PER_FAULT * max(args.count, 2) if args.count else 540
    if 0 < args.count < len(named):
        parser.error(f"--count: {args.count} is fewer than the {len(named)} --faults")
    if not 0 < args.seconds <= 86400 or args.lanes < 1 or args.count < 0:
        parser.error("--seconds must be above 0 and up to 86400, --lanes at least 1, --count at least 0")
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.lanes} clients, backend {args.backend}, {args.seconds:g} s at most", flush=True)
    begin = time.monotonic()
    account = asyncio.run(
        chaos(Options(args.seconds, seed, args.backend, args.lanes, faults, args.count, tls=args.tls, ranks=args.ranks))
    )
    print(f"\n{account.table()}\n\nseed {seed}, {time.monotonic() - begin:.0f} s in all")
    if short := account.short(named):
        print(f"error: {short}", file=sys.stderr)
    return 1 if account.lost or short else 0


if __name__ == "__main__":
    sys.exit(main())
