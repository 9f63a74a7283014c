"""The worth of routing by KV events: hit rates of several pairs behind the gateway, one policy after another.

The load is requests that share long prefixes, too many for one pool and few enough for all of them together. Executors
are oracles: what is measured is where requests go. Needs pagekv[dev].

    python tests/bench/bench_gateway.py
    python tests/bench/bench_gateway.py --policies cache_aware,prefix_hash,round_robin --blocks 2000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.gateway_stack import run_load, running_gateway, shared_prefix_prompts
from support.clients.stack import ORACLE

from pagekv.client import PageKVClient
from pagekv.client.launcher.gateway import POLICIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policies", default="cache_aware,round_robin", help=", ".join(POLICIES))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--prefixes", type=int, default=50)
    parser.add_argument("--prefix-words", type=int, default=256, help="about one token each")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=400, help="blocks of 16 tokens in each pool")
    args = parser.parse_args()
    prompts = shared_prefix_prompts(args.prefixes, args.prefix_words, args.requests)
    print(f"{args.requests} requests over {args.prefixes} prefixes of some {args.prefix_words} tokens, ", end="")
    print(f"{args.replicas} pairs with {args.blocks} blocks each")
    print(f"{'policy':14} {'hit rate':>8}   {'requests of each pair':24} {'evicted blocks':>14} {'seconds':>8}")
    for policy in args.policies.split(","):
        manager_args = ["--num-device-blocks", str(args.blocks)]
        executor_args = [*ORACLE, "--kv-memory", "256MiB"]
        with running_gateway(executor_args, manager_args, replicas=args.replicas, policy=policy) as stack:
            begun = time.monotonic()
            result = asyncio.run(run_load(stack, prompts, concurrency=args.concurrency))
            took = time.monotonic() - begun
            stats = []
            for target in stack.targets:
                with PageKVClient(target) as client:
                    stats.append(client.stats())
        shares = " ".join(str(each.requests_total) for each in stats)
        evicted = sum(each.evicted_blocks_total for each in stats)
        print(f"{policy:14} {result.hit_rate:8.1%}   {shares:24} {evicted:14} {took:8.1f}")
        if result.lost:
            print("\n".join(result.lost), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
