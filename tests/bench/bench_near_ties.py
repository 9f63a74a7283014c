"""How often a split model answers otherwise than one process, greedily: `python tests/bench/bench_near_ties.py`.

Ranks sum parts that one process sums at once, so logits differ in their last bits, and where two tokens are as good as
equal another one may be the likeliest. Random models answer random prompts in one process, over 2 ranks and over 4;
counted are the prompts whose tokens differ, and the tokens up to the first difference. In float64 none should.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.held_port import held_port
from support.clients.stack import ROOT, environment
from support.executor.split_model import WAIT_S, shards_of_this_process

# By name: what is wide in it, as a family's configuration has it. Wide weights make one token stand out.
MODELS = {
    "32768 tokens, as initialised": {"vocab_size": 32768, "initializer_range": 0.02},
    "32768 tokens, wide weights": {"vocab_size": 32768, "initializer_range": 0.3},
    "256 tokens, as initialised": {"vocab_size": 256, "initializer_range": 0.02},
    "256 tokens, wide weights": {"vocab_size": 256, "initializer_range": 0.3},
}
# Sequences of a step: few steps, since every step is many collectives.
BATCH = 150


def rank_0_of(arguments: Sequence[str], ranks: int) -> str:
    """The output of rank 0 of so many, which run Python with these arguments. Raises AssertionError with the last words
    of a rank that failed.
    """
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
    with held_port() as port:
        env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=2 * WAIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    failed = [output[-3000:] for process, output in zip(processes, outputs, strict=True) if process.returncode]
    assert not failed, "\n---\n".join(failed)
    return outputs[0]


def answer(directory: Path, dtype: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Tokens of each prompt, as this rank, or the one process, has them."""
    import torch
    from support.executor.cpu_driver import Driver

    from pagekv.executor.cpu.backend import CpuBackend

    torch.set_num_threads(1)
    shards = None if os.environ["WORLD_SIZE"] == "1" else shards_of_this_process()
    backend = CpuBackend(directory, "split", dtype, threads=1, shards=shards)
    found = []
    for begin in range(0, len(prompts), BATCH):
        driver = Driver(backend, block_size=16, num_blocks=2000)
        found += driver.generate([driver.sequence(prompt) for prompt in prompts[begin : begin + BATCH]], new)
    if shards is not None:
        torch.distributed.barrier()
    return found


def same(one: list[int], other: list[int]) -> int:
    """Tokens in front that are equal."""
    return next((at for at, (ours, theirs) in enumerate(zip(one, other, strict=True)) if ours != theirs), len(one))


def compare(name: str, dtype: str, count: int, new: int) -> None:
    from support.executor.cpu_driver import save_config
    from support.executor.families import family_config

    rng = random.Random(name)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(4, 48))] for _ in range(count)]
    with tempfile.TemporaryDirectory() as directory:
        config = family_config("llama", **{"num_key_value_heads": 2, "intermediate_size": 80, **MODELS[name]})
        save_config(config, Path(directory) / "model", seed=1)
        asked = [str(Path(directory) / "model"), dtype, prompts, new]
        (Path(directory) / "asked.json").write_text(json.dumps(asked))
        arguments = [__file__, "--rank", str(Path(directory) / "asked.json")]
        found = {ranks: json.loads(rank_0_of(arguments, ranks).rpartition("\nANSWERS ")[2]) for ranks in (1, 2, 4)}
    for ranks in (2, 4):
        lengths = [same(one, other) for one, other in zip(found[1], found[ranks], strict=True)]
        differ = sum(length < new for length in lengths)
        # Behind the first difference the contexts are others.
        compared = sum(min(length + 1, new) for length in lengths)
        print(
            f"{name}, {dtype}, {ranks} ranks: {differ} of {count} prompts differ; {differ} of {compared} tokens "
            f"({differ / compared:.1e})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        directory, dtype, prompts, new = json.loads(args.rank.read_text())
        print("\nANSWERS " + json.dumps(answer(Path(directory), dtype, prompts, new)))
        return
    for name in MODELS:
        compare(name, "float32", args.prompts, args.new)
    for name in list(MODELS)[::2]:
        compare(name, "float64", args.prompts, args.new)


if __name__ == "__main__":
    main()
