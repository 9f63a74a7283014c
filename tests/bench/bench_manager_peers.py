"""The manager's cost beside vLLM's, both measured here, in one run: ratios that do not depend on the machine.

    pip download vllm==0.33.0 --no-deps --only-binary :all: -d peers
    python -m zipfile -e peers/vllm-*.whl peers/vllm
    pip install --target peers/vllm cbor2 msgspec psutil pyzmq cachetools blake3 prometheus_client cloudpickle pillow \
        einops py-cpuinfo orjson pybase64 partial-json-parser aiohttp openai openai_harmony sniffio
    python tests/bench/bench_manager_peers.py --vllm peers/vllm

The unpacked wheel is read, not installed: only its Python core is used (`vllm.v1.core`: scheduler, KV cache manager,
block pool), with this environment's PyTorch for CPU, and stand-ins for the packages of ABSENT, which this core imports
and never calls here.

Rounds alternate ours and theirs, each measured as `manager_workloads` does: block size 16, prefix cache on, SHA-256
identities, one thread, no collection of garbage, results checked. vLLM is measured as it runs by default (asynchronous
scheduler one step ahead, `sha256` of pickled tokens, cached environment) but without statistics. Where the two cannot
be cut alike, the cut favours vLLM: admission counts its hash, `get_computed_blocks` and `allocate_slots` against our
whole `schedule`, and its blocks keep no token ids for comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import os
import random
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import manager_workloads as work
import numpy as np

BLOCK_SIZE = work.BLOCK_SIZE
MAX_MODEL_LEN = 262_144
# Imports of vLLM's core for structured output and its HTTP server.
ABSENT = ("xgrammar", "llguidance", "fastapi")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a module whose every attribute is an empty class, for packages that are not installed."""

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Vllm:
    """vLLM's core as an engine process sets it up for a model with one full attention group."""

    def __init__(self, path: Path, hash_name: str) -> None:
        if not (path / "vllm" / "v1" / "core").is_dir():
            raise SystemExit(f"--vllm: {path} has no vllm/v1/core: give the folder a wheel or sdist was unpacked into")
        os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1"}
        # Last, so that this environment's own packages come first.
        sys.path.append(str(path))
        sys.meta_path.append(_Absent())
        load = importlib.import_module
        self.config = load("vllm.config")
        self.interface = load("vllm.v1.kv_cache_interface")
        self.blocks = load("vllm.v1.core.block_pool")
        self.request_class = load("vllm.v1.request").Request
        self.sampling_params = load("vllm.sampling_params").SamplingParams
        self.output_class = load("vllm.v1.outputs").ModelRunnerOutput
        self.float16 = load("torch").float16
        utils = load("vllm.v1.core.kv_cache_utils")
        hash_function = getattr(load("vllm.utils.hashing"), hash_name)
        utils.init_none_hash(hash_function)
        self.hasher = utils.get_request_block_hasher(BLOCK_SIZE, hash_function)
        load("vllm.envs").enable_envs_cache()
        self.version = load("vllm").__version__

    def scheduler(self, num_blocks: int) -> Any:
        """The scheduler that vLLM takes by default, with the bounds that `manager_workloads.scheduler` has."""
        limits = self.config.SchedulerConfig(
            max_num_seqs=2048, max_num_batched_tokens=1 << 20, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        )
        cache = self.config.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        config = self.config.VllmConfig(
            scheduler_config=limits, cache_config=cache, device_config=self.config.DeviceConfig("cpu")
        )
        cache.num_gpu_blocks = num_blocks
        # The questions of the scheduler to a model: plain text in, plain text out.
        absent = (
            "uses_mrope",
            "is_encoder_decoder",
            "is_diffusion",
            "supports_multimodal_inputs",
            "return_sampling_mask",
        )
        model = {"max_model_len": MAX_MODEL_LEN, "runner_type": "generate", "multimodal_config": None}
        config.model_config = types.SimpleNamespace(**dict.fromkeys(absent, False), **model)
        spec = self.interface.FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=self.float16
        )
        groups = [self.interface.KVCacheGroupSpec(["layer"], spec)]
        return limits.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=self.interface.KVCacheConfig(num_blocks, [], groups),
            structured_output_manager=types.SimpleNamespace(accept_tokens=lambda request, ids: True),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )

    def request(self, index: int, prompt: list[int], max_tokens: int, hasher: Any) -> Any:
        """A request; without a hasher its blocks are not hashed yet."""
        params = self.sampling_params(max_tokens=max_tokens)
        params.update_from_generation_config({}, 2)
        return self.request_class(f"r{index}", prompt, params, None, block_hasher=hasher)

    def outcome(self, plan: Any, token: int) -> Any:
        """The answer of a model runner: one token for everyone."""
        ids = list(plan.num_scheduled_tokens)
        return self.output_class(ids, {name: at for at, name in enumerate(ids)}, [[token] for _ in ids])

    def pool(self, num_blocks: int) -> Any:
        """A pool with `num_blocks` blocks beside the null block."""
        return self.blocks.BlockPool(num_blocks + 1, True, BLOCK_SIZE)

    def fill(self, pool: Any, count: int) -> None:
        """Fills `count` free blocks with cached chains of at most 256."""
        for first in range(0, count, 256):
            self.cycle(pool, digests(first, min(256, count - first)))

    def cycle(self, pool: Any, chain: list[bytes]) -> None:
        """Allocates blocks, publishes them and frees them, the last one first, as vLLM does."""
        taken = pool.get_new_blocks(len(chain))
        pool.cache_full_blocks(types.SimpleNamespace(block_hashes=chain), taken, 0, len(chain), BLOCK_SIZE, 0)
        pool.free_blocks(reversed(taken))

    def decode_steps(self, running: int, steps: int) -> list[float]:
        """As `manager_workloads.decode_steps`."""
        engine = self.scheduler(running * (64 + steps // BLOCK_SIZE + 8))
        chance = random.Random(7)
        for index in range(running):
            prompt = [chance.randrange(10, 30_000) for _ in range(256 + index % BLOCK_SIZE)]
            engine.add_request(self.request(index, prompt, steps + 64, self.hasher))
        plan = engine.schedule()
        samples: list[float] = []
        with work._no_collection():
            for step in range(1, steps + 1):
                answer = self.outcome(plan, 100 + step % 50)
                begun = time.perf_counter()
                ahead = engine.schedule()
                engine.update_from_output(plan, answer)
                samples.append(time.perf_counter() - begun)
                assert len(ahead.num_scheduled_tokens) == ahead.total_num_scheduled_tokens == running
                plan = ahead
        assert all(request.num_output_tokens == steps for request in engine.running)
        starts = range(2 * BLOCK_SIZE, steps, BLOCK_SIZE)
        return [sum(samples[at : at + BLOCK_SIZE]) / BLOCK_SIZE for at in starts]

    def admissions(self, length: int, repeats: int, *, cached: bool) -> list[float]:
        """As `manager_workloads.admissions`, without the scheduler."""
        count = length // BLOCK_SIZE
        manager = self.scheduler(2 * count * (repeats + 2) + 1).kv_cache_manager
        self.fill(manager.block_pool, manager.block_pool.get_num_free_blocks())
        assert manager.reset_prefix_cache()
        chance = np.random.default_rng(11)
        prompts = [chance.integers(10, 30_000, length).tolist() for _ in range(1 if cached else repeats + 1)]
        samples: list[float] = []
        with work._no_collection():
            for index in range(repeats + 1):
                request = self.request(index, prompts[0 if cached else index], 1, None)
                request._block_hasher = self.hasher
                begun = time.perf_counter()
                request.update_block_hashes()
                found, hits, _ = manager.get_computed_blocks(request)
                taken = manager.allocate_slots(request, length - hits, hits, found)
                samples.append(time.perf_counter() - begun)
                # A cached prompt is cached but for its last block.
                assert hits == (length - BLOCK_SIZE if cached and index else 0)
                assert len(request.block_hashes) == hits // BLOCK_SIZE + len(taken.blocks[0]) == count
                manager.free(request)
        return samples[1:]

    def churn(self, num_blocks: int, repeats: int, per_sample: int = 64) -> list[float]:
        """As `manager_workloads.churn`."""
        pool = self.pool(num_blocks)
        self.fill(pool, num_blocks)
        samples: list[float] = []
        for at in range(repeats):
            first = num_blocks + at * per_sample * 256
            ready = [digests(first + 256 * serial, 256) for serial in range(per_sample)]
            with work._no_collection():
                begun = time.perf_counter()
                for chain in ready:
                    self.cycle(pool, chain)
                samples.append((time.perf_counter() - begun) / (per_sample * 256))
        assert len(pool.cached_block_hash_to_block) == num_blocks
        return samples


def digests(first: int, count: int) -> list[bytes]:
    """`count` different digests."""
    return [hashlib.sha256(serial.to_bytes(8, "little")).digest() for serial in range(first, first + count)]


@dataclass(frozen=True, slots=True)
class Pair:
    """One kind of work, done by both; a call gives the samples of one round, in seconds or bytes."""

    work: str
    unit: str
    scale: float
    ours: Callable[[], list[float]]
    theirs: Callable[[], list[float]]
    # A figure that does not vary needs no second round.
    once: bool = False

    def measure(self, rounds: int) -> str:
        """One line of the table. The first to go alternates."""
        sides: tuple[list[float], list[float]] = ([], [])
        for at in range(1 if self.once else rounds):
            for side in (0, 1) if at % 2 else (1, 0):
                sides[side].append(statistics.median((self.ours, self.theirs)[side]()))
        ours, theirs = (statistics.median(side) * self.scale for side in sides)
        ratios = sorted(b / a for a, b in zip(*sides, strict=True))
        quarter = len(ratios) // 4
        spread = "" if self.once else f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        return f"{self.work:40} {ours:9.4g} {theirs:9.4g}  {self.unit:6} {theirs / ours:6.2f} {spread:>16}"


def pairs(vllm: Vllm, path: Path, blocks: int = 1_000_000) -> list[Pair]:
    """All work, each round cut so that it takes about a second."""

    def decodes(count: int, steps: int = 5 * BLOCK_SIZE) -> Pair:
        name = f"schedule + commit, {count} decodes"
        return Pair(name, "us", 1e6, lambda: work.decode_steps(count, steps), lambda: vllm.decode_steps(count, steps))

    def admits(name: str, length: int, repeats: int, *, cached: bool = False) -> Pair:
        unit, scale = ("us", 1e6) if length < 10_000 else ("ms", 1e3)
        ours, theirs = work.admissions, vllm.admissions
        args, kwargs = (length, repeats), {"cached": cached}
        return Pair(name, unit, scale, lambda: ours(*args, **kwargs), lambda: theirs(*args, **kwargs))

    def memory() -> list[float]:
        script = (
            f"import bench_manager_peers as b, manager_workloads as w; vllm = b.Vllm(b.Path({str(path)!r}), 'sha256'); "
            f"before = w.resident(); pool = vllm.pool({blocks}); vllm.fill(pool, {blocks}); "
            f"print((w.resident() - before) / {blocks})"
        )
        here = Path(__file__).parent
        done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True, cwd=here)
        return [float(done.stdout)]

    return [
        decodes(256),
        decodes(1024),
        admits("admit a cold 4096-token prompt", 4096, 5),
        admits("admit it fully cached", 4096, 5, cached=True),
        admits("admit a cold 131072-token prompt", 131_072, 2),
        Pair("evict, publish, free a block", "ns", 1e9, lambda: work.churn(10_000, 3), lambda: vllm.churn(10_000, 3)),
        Pair("memory per cached block", "bytes", 1, lambda: [work.bytes_per_block(blocks)], memory, once=True),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--vllm", type=Path, required=True, help="folder that a wheel of vLLM was unpacked into")
    parser.add_argument("--hash", default="sha256", choices=["sha256", "sha256_cbor"], help="vLLM's hash function")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row, at least 9 (default: 9)")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    args = parser.parse_args()
    if args.rounds < 9:
        parser.error(f"--rounds: must be at least 9, got {args.rounds}")
    path = args.vllm.resolve()
    vllm = Vllm(path, args.hash)
    print(f"vLLM {vllm.version}, {args.hash}; medians of {args.rounds} alternating rounds; ratio: theirs / ours")
    print(f"{'work':40} {'ours':>9} {'vLLM':>9}  {'unit':6} {'ratio':>6} {'middle half':>16}")
    for pair in pairs(vllm, path):
        if args.only in pair.work:
            print(pair.measure(args.rounds), flush=True)


if __name__ == "__main__":
    main()
