"""Bounds of messages, as the contract has them."""

from __future__ import annotations

import re
from pathlib import Path

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES, MAX_RESULT_BYTES, max_step_bytes

CONTRACT = Path(__file__).resolve().parents[3] / "proto/pagekv/steps/v1/executor_service.proto"


def test_steps_are_as_large_as_the_contract_allows() -> None:
    rule = " ".join(re.findall(r"//\s+(.*)", CONTRACT.read_text().partition("P13")[2].partition("Refusals:")[0]))
    words = "messages of 4 MiB, or of 32 bytes for each token of max_model_len where that is more, up to 256 MiB."
    assert words in rule
    assert "takes results of 256 MiB" in rule
    sizes = [max_step_bytes(length) for length in (2, 2**17, 2**17 + 1, 2**20, 2**23, 2**31 - 1)]
    assert sizes == [2**22, 2**22, 2**22 + 32, 2**25, 2**28, 2**28]


def test_a_manager_takes_what_grpc_takes_by_default() -> None:
    assert (MAX_RECEIVE_BYTES, MAX_RESULT_BYTES) == (4194304, 2**28)
