"""FlashInfer at the same shapes, in a process of its own: `python -m pagekv.kernels.bench.flashinfer_peer CASE...`.

It compiles its kernels when they are first used, which can take minutes or fail; so it has a process of its own, which
prints a line of JSON for each case that got done and is ended when time is up. The first line names the version. A case
is `decode:HEADS:KV_HEADS:BATCH:CONTEXT` or `prefill:HEADS:KV_HEADS:BATCH:NEW:CACHED`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagekv.kernels.bench.machine import Arena, CudaMachine, Machine
from pagekv.kernels.bench.paged import Rounds
from pagekv.kernels.bench.speed import PREFILL_ROUNDS
from pagekv.kernels.bench.workload import BLOCK_SIZE, HEAD_SIZE, MIB, DecodeCase, Heads, PrefillCase

MODULE = "pagekv.kernels.bench.flashinfer_peer"
Case = DecodeCase | PrefillCase


def to_text(case: Case) -> str:
    heads = f"{case.heads.num_heads}:{case.heads.num_kv_heads}"
    if isinstance(case, DecodeCase):
        return f"decode:{heads}:{case.batch}:{case.context}"
    return f"prefill:{heads}:{case.batch}:{case.new}:{case.cached}"


def from_text(text: str) -> Case:
    kind, *numbers = text.split(":")
    num_heads, num_kv_heads, *shape = map(int, numbers)
    heads = Heads("", num_heads, num_kv_heads)
    if kind == "decode":
        batch, context = shape
        return DecodeCase(heads, batch, context)
    return PrefillCase(heads, *shape)


# --- the peer's process


def page_table(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr, indices, last page's length): pages in random order, as many for each sequence as it has blocks."""
    width = -(-case.context // BLOCK_SIZE)
    indptr = torch.arange(0, (case.batch + 1) * width, width, dtype=torch.int32, device=device)
    indices = torch.randperm(case.batch * width, device=device).to(torch.int32)
    last = torch.full((case.batch,), (case.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device)
    return indptr, indices, last


def seconds(machine: Machine, arena: Arena, flashinfer: Any, workspace: torch.Tensor, case: Case) -> float:
    """Median seconds of one layer."""
    heads, rows = case.heads, case.batch * (1 if isinstance(case, DecodeCase) else case.new)
    plan = Rounds.of(case.kv_bytes, arena.size, machine.most_rounds)
    layers = plan.layers
    width = -(-case.context // BLOCK_SIZE)
    shape = (layers, case.batch * width, 2, BLOCK_SIZE, heads.num_kv_heads, HEAD_SIZE)
    cache = arena.view(torch.bfloat16, *shape)
    query = torch.randn(rows, heads.num_heads, HEAD_SIZE, device=machine.device).to(torch.bfloat16)
    pages = page_table(case, machine.device)
    common = (*pages, heads.num_heads, heads.num_kv_heads, HEAD_SIZE, BLOCK_SIZE)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if isinstance(case, DecodeCase):
        # FlashInfer's own advice: tensor cores pay from four query heads a KV head.
        grouped = heads.num_heads // heads.num_kv_heads >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        wrapper.plan(*common, **types)
        rounds = plan.count
    else:
        starts = torch.arange(0, rows + 1, case.new, dtype=torch.int32, device=machine.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(starts, *common, causal=True, **types)
        rounds = min(layers, PREFILL_ROUNDS)
    out = torch.empty_like(query)
    return machine.timed(lambda index: wrapper.run(query, cache[index % layers], out=out), rounds).seconds


def load() -> Any:
    """The module, told to compile for this GPU alone: every other architecture would take as long again."""
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    return importlib.import_module("flashinfer")


def main(argv: Sequence[str]) -> int:
    flashinfer = load()
    print(json.dumps({"version": getattr(flashinfer, "__version__", "unknown")}), flush=True)
    machine = CudaMachine(lambda line: None)
    arena = Arena(machine, machine.memory())
    workspace = torch.zeros(256 * MIB, dtype=torch.uint8, device=machine.device)
    for text in argv:
        try:
            line = {"case": text, "seconds": seconds(machine, arena, flashinfer, workspace, from_text(text))}
        except (RuntimeError, ValueError, TypeError) as error:
            line = {"case": text, "failed": str(error).splitlines()[0][:200]}
        print(json.dumps(line), flush=True)
    return 0


# --- the bench's side


class FlashInferPeer:
    """The peer's process, from this side."""

    def __init__(self, cases: Sequence[Case], command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self.command = [*command, *(to_text(case) for case in cases)]

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("flashinfer") is not None

    def measure(self, limit: float, now: Callable[[], float] = time.monotonic) -> dict[str, Any]:
        """{"version": ..., "seconds": {case: seconds}, "note": what went wrong}, in at most `limit` seconds."""
        found: dict[str, Any] = {"version": None, "seconds": {}, "note": ""}
        started = now()
        process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        killer = threading.Timer(limit, _end, [process])
        killer.start()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        reader.start()
        try:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue  # what its compiler says
                message = json.loads(line)
                found["version"] = message.get("version", found["version"])
                if "seconds" in message:
                    found["seconds"][message["case"]] = message["seconds"]
                elif "failed" in message:
                    found["note"] = f"{message['case']}: {message['failed']}"
            process.wait()
        finally:
            killer.cancel()
            _end(process)
            process.wait()
        reader.join(timeout=5)
        if now() - started >= limit:
            found["note"] = f"stopped after {limit:.0f} s"
        elif process.returncode:
            found["note"] = (errors or ["no message"])[-1].strip()[:200]
        return found


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and the compilers it started, which share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
