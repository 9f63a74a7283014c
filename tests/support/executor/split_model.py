"""Ranks of split models as processes: each runs the same steps over a backend, and rank 0 tells the answers.

All are forked from one process that has imported torch and transformers, since these imports take most of the CPU time
of a rank that has to do them itself. How ranks come up from nothing is shown by tests/e2e/test_ranks.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from support.clients.held_port import held_port

if TYPE_CHECKING:
    from pagekv.executor.model.shards import Shards

WAIT_S = 300.0
# None of them starts a thread while it is imported, which a fork would lose.
PRELOADED = ["pagekv.executor.cpu.backend", "torch.distributed.tensor"]
# Beams of a search, and the token that ends one.
BEAMS, END = 3, 7


@dataclass(frozen=True)
class SplitRun:
    """Prompts over one model, in blocks of 4 and 8: cold in one batch; in chunks with preemptions, by recomputation
    and by swap; behind hits of the first prompt, of so many tokens each; and beams of the first one. `device`: by the
    cpu backend, or by the cuda backend with emulated kernels ("cuda").
    """

    directory: str
    prompts: list[list[int]]
    hits: list[int]
    new: int
    dtype: str = "float32"
    fused: bool = True
    device: str = "cpu"


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Its processes are forked from the one that has imported torch and transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def answers_of(runs: Sequence[SplitRun], ranks: int) -> list[dict[str, Any]]:
    """Of each run `cold`, `preempted`, `hits` and `sampled`, the tokens of each prompt; `beams`, those of each result;
    and `kv_heads` of each rank, whether compiled loops or fused layers computed it (`fused`), and how many graphs were
    replayed (`replayed`). Raises AssertionError with the last words of a rank that failed.
    """
    context = fork_context()
    with held_port() as port, tempfile.TemporaryDirectory() as temporary:
        env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        outputs = [Path(temporary) / str(rank) for rank in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(runs, {**env, "RANK": str(rank)}, output), daemon=True)
            for rank, output in enumerate(outputs)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(2 * WAIT_S)
        finally:
            for process in processes:
                if process.pid is not None:  # or it was not started
                    process.kill()
        failed = [
            output.read_text(errors="replace")[-3000:] if output.exists() else f"ended with {process.exitcode}"
            for process, output in zip(processes, outputs, strict=True)
            if process.exitcode != 0
        ]
        assert not failed, "\n---\n".join(failed)
        found: list[dict[str, Any]] = json.loads(outputs[0].read_text().rpartition("\nANSWERS ")[2])
        return found


def shards_of_this_process() -> Shards:
    """Of a process that is started as torchrun starts ranks, joined to the others."""
    from pagekv.executor.model.shards import Shards
    from pagekv.executor.ranks.gathering import JoinTime, Meeting
    from pagekv.executor.ranks.rendezvous import join_process_group, open_store
    from pagekv.executor.ranks.watch import end_process
    from pagekv.executor.world import read_world

    world = read_world(os.environ)
    joining = JoinTime(WAIT_S)
    join_process_group(open_store(world, joining), world, Meeting("", 0, "test"), joining)
    shards = Shards(world, end_process)
    shards.limit_waits(WAIT_S)
    return shards


def _run(run: SplitRun, shards: Any) -> dict[str, Any]:
    from support.executor.cpu_driver import Driver

    backend, fused = _cpu_backend(run, shards) if run.device == "cpu" else _cuda_backend(run, shards)
    driver = Driver(backend, block_size=4)
    cold = driver.generate([driver.sequence(prompt) for prompt in run.prompts], run.new)
    driver = Driver(backend, block_size=8, host_blocks=16)
    states = [driver.sequence(prompt) for prompt in run.prompts]
    driver.generate(states, run.new // 2, chunk=11)
    driver.preempt(states[0])
    driver.swap_out_and_in(states[1])
    preempted = driver.generate(states, run.new, chunk=13)
    driver = Driver(backend, block_size=8)
    owner, *others = (driver.sequence(prompt) for prompt in run.prompts)
    driver.step({owner.seq_id: 10**6}, [owner])
    for state, hit in zip(others, run.hits, strict=True):
        driver.share(owner, state, hit)
    hits = driver.generate([owner, *others], run.new)
    heads = backend._loaded.geometry.num_kv_heads
    replayed = backend.runner.graphs.num_replayed if run.device == "cuda" else 0
    found = {"cold": cold, "preempted": preempted, "hits": hits, "sampled": sampled(backend, run.prompts, run.new)}
    found["beams"] = _beams(backend, run.prompts[0], run.new, shards)
    return {**found, "kv_heads": heads, "fused": fused, "replayed": replayed}


def sampled(backend: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The tokens of each prompt, drawn and penalised."""
    from support.executor.cpu_driver import Driver

    from pagekv.executor.backend.interface import Sampling

    driver = Driver(backend, block_size=8)
    drawn = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2)
    states = [driver.sequence(prompt, sampling=replace(drawn, seed=seed)) for seed, prompt in enumerate(prompts)]
    return driver.generate(states, new)


def _beams(backend: Any, prompt: list[int], new: int, shards: Any) -> list[list[int]]:
    import torch
    from support.engine.fake_executor import beam_search
    from support.executor.beam_driver import BeamDriver

    from pagekv.executor.backend.interface import SequenceState

    class Told(BeamDriver):
        """Rank 0 alone knows candidates: in a group the manager tells the others which beams go on."""

        def _candidates(self, states: list[SequenceState]) -> list[Any]:
            found = [super()._candidates(states)]
            torch.distributed.broadcast_object_list(found, 0)
            return found[0]

    search = beam_search(BEAMS, BEAMS, 1.0, False, new, frozenset([END]))
    Told(backend, block_size=4).search(prompt, search)
    return [list(result.token_ids) for result in search.results()]


def _cpu_backend(run: SplitRun, shards: Any) -> tuple[Any, bool]:
    from pagekv.executor.cpu.backend import CpuBackend
    from pagekv.executor.cpu.forward import ModuleForward

    backend = CpuBackend(Path(run.directory), "split", run.dtype, threads=1, fused=run.fused, shards=shards)
    return backend, not isinstance(backend._forward, ModuleForward)


def _cuda_backend(run: SplitRun, shards: Any) -> tuple[Any, bool]:
    from support.executor.cuda_host import host_backend

    from pagekv.executor.cuda.fused_decoder import FusedLayers

    options = {"dtype": run.dtype, "fused": run.fused, "shards": shards, "max_sequences": 8}
    backend = host_backend(Path(run.directory), **options)
    return backend, isinstance(backend.forward, FusedLayers)


def write_to(output: Path, *streams: TextIO) -> None:
    """Sends the output of this process on these streams to a file."""
    with output.open("wb") as said:
        for stream in streams:
            stream.flush()
            os.dup2(said.fileno(), stream.fileno())


def _rank(runs: Sequence[SplitRun], variables: dict[str, str], output: Path) -> None:
    """One rank, with these variables of the environment; what it says goes to a file."""
    import torch

    os.environ.update(variables)
    write_to(output, sys.stdout, sys.stderr)
    torch.set_num_threads(1)
    shards = shards_of_this_process()
    found = [_run(run, shards) for run in runs]
    # Every rank has the same tokens, and replayed as many graphs.
    every: list[Any] = [None] * shards.size
    torch.distributed.all_gather_object(every, found)
    assert every == [found] * shards.size
    print("\nANSWERS " + json.dumps(found), flush=True)
    torch.distributed.barrier()
    # As ranks end (`server.main`).
    os._exit(0)
