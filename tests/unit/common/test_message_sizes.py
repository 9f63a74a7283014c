"""Bounds of messages, as the contract has them."""

from __future__ import annotations

import re
from pathlib import Path

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES, MAX_RESULT_BYTES

CONTRACT = Path(__file__).resolve().parents[3] / "proto/pagekv/steps/v1/executor_service.proto"


def test_steps_and_results_are_as_large_as_the_contract_allows() -> None:
    rule = re.sub(r"\n//\s+", " ", CONTRACT.read_text().partition("P13")[2].partition("Refusals:")[0])
    assert "An executor takes steps of 4 MiB" in rule
    assert "takes results of 256 MiB" in rule
    assert (MAX_RECEIVE_BYTES, MAX_RESULT_BYTES) == (2**22, 2**28)


def test_an_executor_takes_what_grpc_takes_by_default() -> None:
    assert MAX_RECEIVE_BYTES == 4194304
