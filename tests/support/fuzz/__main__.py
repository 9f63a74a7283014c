"""`make fuzz`: messages at random to both gRPC APIs, the executor and the HTTP port, from a printed seed.

Exit status 0: every answer was one that the contract has, within the bounds of memory and silence, and a stream beside
them got its tokens. 1: something was wrong; it is shown, with what makes it again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from support.fuzz.run import LANES, Options, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=540, help="how long at most [540]")
    parser.add_argument("--messages", type=int, default=0, help="end after so many messages; 0: as time allows [0]")
    parser.add_argument("--seed", type=int, help="which messages; drawn and printed unless given")
    parser.add_argument("--only", metavar="PORT:NUMBER", help="one case again and again, as a failure names it")
    args = parser.parse_args()
    port, _, number = (args.only or "").partition(":")
    if args.only and (port not in LANES or not number.isdigit() or args.seed is None):
        parser.error(
            f"--only must be a port ({', '.join(LANES)}), a colon and a number, with the --seed of the failure"
        )
    if not 0 < args.seconds <= 86400 or args.messages < 0:
        parser.error("--seconds must be above 0 and up to 86400, --messages at least 0")
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.seconds:g} s at most", flush=True)
    account = asyncio.run(fuzz(Options(seed, args.seconds, args.messages, (port, int(number)) if args.only else None)))
    print(account.table())
    return 1 if account.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
