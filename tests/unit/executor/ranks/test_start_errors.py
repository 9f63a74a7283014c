"""Which errors of a start can pass, and what people are told of each."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from pagekv.common.models import ModelNotFound
from pagekv.executor.ranks.agreement import RanksDisagree
from pagekv.executor.ranks.gathering import NoGroup
from pagekv.executor.ranks.start_errors import CannotStart, can_pass, expected_words, words_of


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.mark.parametrize(
    "error",
    [
        NoGroup("rank 1 is missing"),
        ConnectionResetError("reset"),
        TimeoutError("late"),
        GLOO,
        DistBackendError("NCCL"),
        caused(ValueError("--backend cuda: the GPU cannot be used"), DistBackendError("NCCL")),
        caused(ValueError("a start"), caused(ValueError("a part"), GLOO)),
    ],
)
def test_what_others_or_the_network_cause_can_pass(error: Exception) -> None:
    assert can_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("too little"),
        OSError("no such file"),
        ValueError("a flag"),
        ImportError("numba"),
        ModelNotFound("nowhere"),
        RanksDisagree("rank 0 and rank 1 differ"),
        CannotStart("rank 1: too little"),
        RuntimeError("shapes differ"),
    ],
)
def test_what_a_rank_has_of_its_own_comes_again(error: Exception) -> None:
    assert not can_pass(error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModelNotFound("nowhere"), "--model cannot be used: nowhere"),
        (ModuleNotFoundError("no numba"), "a package is missing; pip install 'pagekv[executor]': no numba"),
        (
            ImportError("libc10.so: failed to map segment from shared object"),
            "an installed package cannot be imported; pip install -U 'pagekv[executor]' may help: "
            "libc10.so: failed to map segment from shared object",
        ),
        (MemoryError(), "MemoryError"),
        (ValueError("--dtype int4: no"), "--dtype int4: no"),
    ],
)
def test_words_of_what_is_expected(error: Exception, words: str) -> None:
    assert expected_words(error) == words_of(error) == words


def test_words_of_a_surprise_are_one_line_with_its_type() -> None:
    error = RuntimeError("shapes differ\nin many lines")
    assert expected_words(error) == ""
    assert words_of(error) == "RuntimeError: shapes differ"
