"""Facts that a rank has to have like the others, the backend that ranks take, and flags that they cannot have."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pagekv.common.models import ModelNotFound
from pagekv.executor import group
from pagekv.executor.config import parse_config
from pagekv.executor.cuda import preflight
from pagekv.executor.cuda.preflight import Builds, Gpu, UnusableGpu
from pagekv.executor.group import check_group, rank_facts, rank_threads, settled
from pagekv.executor.machine import usable_cores
from pagekv.executor.ranks.agreement import FAILURE
from pagekv.executor.ranks.gathering import JoinTime, Meeting, NoGroup
from pagekv.executor.ranks.link import Kind
from pagekv.executor.ranks.start_errors import CannotStart
from pagekv.executor.world import World

TIME = ("seconds", 300.0)
WORLD = World(1, 2, 2, "127.0.0.1", 29500)


def test_facts_are_equal_for_equal_ranks_and_name_what_differs() -> None:
    ours = rank_facts(parse_config(["--model", "demo", "--backend", "oracle"], {}), WORLD)
    assert ours == rank_facts(parse_config(["--model", "demo", "--backend", "oracle"], {}), World(0, 2, 2))
    theirs = rank_facts(parse_config(["--backend", "oracle", "--vocab-size", "7"], {}), WORLD)
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == {
        "--vocab-size",
        "the model's fingerprint",
    }


def test_ranks_that_compute_need_equal_packages_and_threads() -> None:
    facts = rank_facts(parse_config(["--backend", "cpu", "--threads", "3"], {}), WORLD)
    assert facts["--backend"] == "cpu"
    assert facts["compute threads"] == 3
    assert {"torch", "transformers", "--dtype", "the processor's vector instructions"} <= facts.keys()


@pytest.mark.parametrize(("backend", "needed"), [("oracle", False), ("cpu", True)])
def test_ranks_import_meta_kernels_only_for_a_model(
    backend: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle needs torch's store and no tensors."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    called: list[bool] = []
    monkeypatch.setattr(group, "import_torch", lambda *, meta_kernels: called.append(meta_kernels))
    group._import_torch(backend)
    assert called == [needed]


def test_ranks_of_a_machine_share_its_cores() -> None:
    config = parse_config([], {})
    assert rank_threads(config, World(0, 4, 1)) == usable_cores()
    assert rank_threads(config, World(0, 4, 4)) == max(1, usable_cores() // 4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "cuda"], "LOCAL_RANK: must be from 0 to 1 with --backend cuda"),
        (["--backend", "cpu", "--kv-dtype", "fp8"], "--kv-dtype fp8 needs --backend cuda"),
        (["--backend", "cpu", "--wgmma-prefill"], "--wgmma-prefill needs --backend cuda"),
    ],
)
def test_what_ranks_cannot_have_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_group(parse_config(flags, {}), WORLD)


@pytest.mark.parametrize("found", ["4.57.1", "5.17.0", "5.22.0.dev0"])
def test_a_transformers_that_splits_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(group, "version", lambda _: found)
    with pytest.raises(ValueError, match=f"transformers {found} splits .*need 5.23 or later"):
        check_group(parse_config(["--backend", "cpu"], {}), WORLD)
    check_group(parse_config(["--backend", "oracle"], {}), WORLD)


@pytest.mark.parametrize("found", ["5.23.0", "5.30.1", "6.0.0"])
def test_a_newer_transformers_is_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(group, "version", lambda _: found)
    check_group(parse_config(["--backend", "cpu"], {}), WORLD)


def test_ranks_with_a_gpu_each_may_have_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "version", lambda _: "5.23.0")
    flags = ["--backend", "cuda", "--kv-dtype", "fp8"]
    check_group(parse_config(flags, {}), World(1, 2, 2, "127.0.0.1", 29500, local_rank=1))


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, builds: Builds) -> None:
    """A machine with so many GPUs."""

    def find(*, index: int = 0) -> Gpu:
        if index >= count:
            raise UnusableGpu("too few")
        return Gpu("H", 90, 2**37, (13, 0))

    monkeypatch.setattr(preflight, "find_gpu", find)
    monkeypatch.setattr(preflight, "installed_builds", lambda: builds)


@pytest.mark.parametrize(
    ("count", "builds", "backend"),
    [
        (2, Builds(13, True, (13,)), "cuda"),
        (1, Builds(13, True, (13,)), "cpu"),
        (2, Builds(0, True, (13,)), "cpu"),
        (2, Builds(13, False, ()), "cpu"),
        (2, Builds(14, True, (13,)), "cpu"),
    ],
)
def test_ranks_take_gpus_where_there_is_one_for_each(
    monkeypatch: pytest.MonkeyPatch, count: int, builds: Builds, backend: str
) -> None:
    """All ranks of a machine find the same."""
    gpus(monkeypatch, count, builds)
    config = parse_config([], {})
    assert [settled(config, World(rank, 2, 2, local_rank=rank)).backend for rank in (0, 1)] == [backend] * 2
    # Of ranks that do not know which of them they are on a machine none can have a GPU.
    assert settled(config, World(0, 2, 2)).backend == "cpu"
    chosen = parse_config(["--backend", "oracle"], {})
    assert settled(chosen, WORLD) is chosen


def test_ranks_on_gpus_need_equal_ones_and_what_shapes_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, Builds(13, True, (13,)))
    config = parse_config(["--backend", "cuda", "--max-sequences", "7"], {})
    facts = rank_facts(config, World(1, 2, 2, local_rank=1))
    assert (facts["the GPU"], facts["--max-sequences"], facts["--cuda-graphs"]) == ("H", 7, True)
    assert {"torch", "CuPy", "--kv-dtype", "--dtype", "--fused"} <= facts.keys()
    with pytest.raises(ValueError, match="--backend cuda: too few"):
        rank_facts(config, World(2, 4, 4, local_rank=2))


@pytest.mark.parametrize("backend", ["cpu", "oracle"])
def test_more_ranks_than_heads_are_refused_before_anything_is_waited_for(backend: str) -> None:
    """The oracle answers in the name of a model that so many ranks cannot share."""
    config = parse_config(["--backend", backend, "--model", "demo"], {})
    with pytest.raises(ValueError, match=r"3 ranks .* do not divide the 4 query heads"):
        rank_facts(config, World(1, 3, 3, "127.0.0.1", 29500))


@pytest.mark.parametrize(
    ("backend", "done"),
    [("oracle", []), ("cpu", [("group", False), TIME]), ("cuda", [("group", True), ("GPU", 1), TIME])],
)
def test_ranks_on_gpus_connect_them_behind_their_group(
    monkeypatch: pytest.MonkeyPatch, backend: str, done: list[tuple[str, object]]
) -> None:
    found: list[tuple[str, object]] = []
    monkeypatch.setattr(group, "join_process_group", lambda *_, gpus: found.append(("group", gpus)))
    monkeypatch.setattr(group, "connect_gpus", lambda index: found.append(("GPU", index)))
    monkeypatch.setattr(group, "limit_collectives", lambda seconds: found.append(("seconds", seconds)))
    store: Any = None
    world = World(3, 4, 2, "one", 29500, local_rank=1)
    group._join_collectives(parse_config(["--backend", backend], {}), store, world, Meeting("", 0, "x"), JoinTime(1.0))
    assert found == done


@pytest.mark.parametrize(
    ("error", "served", "told", "raised"),
    [
        (MemoryError("too little"), False, ("rank 1: too little", Kind.CANNOT_START), CannotStart),
        (CannotStart("rank 0: too little"), False, ("rank 0: too little", Kind.CANNOT_START), CannotStart),
        (RuntimeError("a\nb"), False, ("rank 1: RuntimeError: a", Kind.CANNOT_START), CannotStart),
        # The memory was there once.
        (MemoryError("too little"), True, ("too little", Kind.ENDS), NoGroup),
        (CannotStart("rank 0: too little"), True, ("rank 0: too little", Kind.ENDS), NoGroup),
        (NoGroup("rank 0 is missing"), False, ("rank 0 is missing", Kind.ENDS), NoGroup),
        (ConnectionResetError("reset"), False, ("reset", Kind.ENDS), ConnectionResetError),
    ],
)
def test_an_error_of_a_start_ends_it_for_all_unless_it_can_pass(
    error: Exception, served: bool, told: tuple[str, Kind], raised: type[Exception]
) -> None:
    found: list[tuple[str, Kind]] = []
    with pytest.raises(raised) as caught, group._start(WORLD, served, lambda *words: found.append(words)):
        raise error
    assert type(caught.value) is raised
    assert found == [told]
    assert str(caught.value) == told[0]


@pytest.mark.parametrize(
    ("world", "met"),
    [
        (World(1, 2, 2, has_store=True), True),
        (World(0, 2, 1, has_store=True), True),
        # Ranks before it may have served, which the store tells.
        (World(0, 2, 2, has_store=True, anew=True), True),
        # Others end with torchrun, or nobody starts this rank anew.
        (World(0, 2, 2, has_store=True), False),
        (World(1, 2, 2), False),
    ],
)
def test_other_ranks_are_met_to_be_told_why_this_one_cannot_start(world: World, met: bool) -> None:
    # An oracle, which needs no transformers of a version that ranks take.
    config = parse_config(["--backend", "oracle", "--model", "/nowhere"], {})
    if met:
        assert "--model cannot be used: " in group._facts_or_failure(config, world)[FAILURE]
    else:
        with pytest.raises(ModelNotFound):
            group._facts_or_failure(config, world)
