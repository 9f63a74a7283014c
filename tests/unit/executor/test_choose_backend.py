"""Backends are loaded as flags and ranks say, and without the packages of others."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.clients.stack import environment

from pagekv.executor.choose_backend import load_backend
from pagekv.executor.config import parse_config
from pagekv.executor.cuda import preflight
from pagekv.executor.cuda.preflight import Builds, Gpu
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World

# In a process of its own, which imports nothing before.
LOAD = """
import sys
from pagekv.executor.config import parse_config
from pagekv.executor.choose_backend import load_backend
load_backend(parse_config(['--backend', sys.argv[1], '--model', 'demo'], env={}))
print(sorted({'torch', 'transformers', 'safetensors', 'huggingface_hub'} & sys.modules.keys()))
"""


def load(backend: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, backend], env=env, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.e2e
def test_the_oracle_never_imports_torch() -> None:
    done = load("oracle", environment())
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.e2e
def test_threads_of_the_cpu_backend_spin_for_a_tenth_of_a_millisecond() -> None:
    """The setting must come before torch, wherever that is imported first. The runtime's own is 300,000 turns."""
    env = {name: value for name, value in environment().items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = load("cpu", env | {"OMP_DISPLAY_ENV": "verbose"})
    assert "torch" in done.stdout, done.stderr
    turns = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert turns is not None, "torch is built with another runtime"
    assert 100 <= int(turns[1]) <= 50_000


def test_a_machine_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"--backend cuda: there is no NVIDIA driver|--backend cuda: .* no GPU"):
        load_backend(parse_config(["--backend", "cuda"], env={}))
    with pytest.raises(ValueError, match="--kv-dtype fp8 needs --backend cuda"):
        load_backend(parse_config(["--kv-dtype", "fp8"], env={}))
    with pytest.raises(ValueError, match="--wgmma-prefill needs --backend cuda"):
        load_backend(parse_config(["--wgmma-prefill"], env={}))


class Stopped(Exception):
    """Ends a start where a test has seen enough."""


def test_a_rank_has_the_gpu_of_its_number_and_a_share_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def find(*, index: int) -> Gpu:
        asked.append(index)
        return Gpu("H", 90, 2**37, (13, 0))

    def check(*_: object, ranks: int) -> None:
        asked.append(ranks)
        raise Stopped

    monkeypatch.setattr(preflight, "find_gpu", find)
    monkeypatch.setattr(preflight, "installed_builds", lambda: Builds(13, True, (13,)))
    monkeypatch.setattr(preflight, "check_model", check)
    with pytest.raises(Stopped):
        load_backend(parse_config(["--backend", "cuda"], env={}), World(3, 4, 2, local_rank=1))
    assert asked == [1, 4]


def test_ranks_on_cpus_share_the_memory_of_their_machine_and_limit_waits_once_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    def make(*_: object, shards: Shards, threads: int, **__: object) -> None:
        done.append((shards.rank, shards.size, threads, shards.limit_s))

    monkeypatch.setattr("pagekv.executor.choose_backend.available_bytes", lambda: 2**33)
    monkeypatch.setattr("pagekv.executor.model.transformers_import.import_transformers", lambda *, distributed: None)
    monkeypatch.setattr("pagekv.executor.cpu.backend.CpuBackend.__init__", make)
    monkeypatch.setattr(Shards, "limit_waits", lambda _, seconds: done.append(seconds))
    world = World(1, 4, 2, local_rank=1)
    flags = ["--backend", "cpu", "--threads", "3", "--rank-timeout-s", "7"]
    load_backend(parse_config([*flags, "--kv-memory", "4GiB"], env={}), world)
    assert done == [(1, 4, 3, None), 7.0]
    with pytest.raises(ValueError, match=r"at most 4294967296 bytes \(.* GiB\) are available on each rank"):
        load_backend(parse_config([*flags, "--kv-memory", "5GiB"], env={}), world)


def test_a_rank_on_a_gpu_has_its_share_and_limits_waits_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def make(*_: object, shards: Shards, **__: object) -> None:
        done.append((shards.rank, shards.size, shards.limit_s))

    monkeypatch.setattr(preflight, "find_gpu", lambda *, index: Gpu("H", 90, 2**37, (13, 0)))
    monkeypatch.setattr(preflight, "installed_builds", lambda: Builds(13, True, (13,)))
    monkeypatch.setattr("pagekv.executor.cuda.device.CudaDevice.__init__", lambda _: None)
    monkeypatch.setattr("pagekv.executor.cuda.backend.CudaBackend.__init__", make)
    monkeypatch.setattr(Shards, "limit_waits", lambda _, seconds: done.append(seconds))
    config = parse_config(["--backend", "cuda", "--rank-timeout-s", "7"], env={})
    load_backend(config, World(1, 2, 2, local_rank=1))
    assert done == [(1, 2, None), 7.0]
