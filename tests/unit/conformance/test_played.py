"""Steps as a manager makes them, and every result held against its step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.executor.judged import kit_of, toy

from pagekv.conformance.kit import Kit
from pagekv.conformance.played import PlayedEpoch, neutral
from pagekv.conformance.verdict import BrokenRule
from pagekv.steps.v1 import executor_service_pb2 as pb


@pytest.fixture
def kit() -> Iterator[Kit]:
    with toy() as address, kit_of(address) as made:
        yield made


def test_a_sequence_is_played_from_end_to_end(kit: Kit) -> None:
    with kit.epoch([5, 4, 3]) as epoch:
        seq = epoch.sequence(range(16))
        epoch.step([seq], counts={seq: 10})
        assert (seq.blocks, seq.computed, seq.length, seq.outputs) == ([3], 10, 16, [])
        epoch.step(counts={seq: 6})
        epoch.decode(1)
        assert (seq.blocks, seq.computed, seq.length, len(seq.outputs)) == ([3, 4], 17, 18, 2)
        epoch.step(others=0)
        epoch.leave(seq)
        assert (epoch.free, epoch.live) == ([5, 4, 3], {})
        assert seq.entering().token_ids[:16] == list(range(16))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"step": 2}, "result of epoch, step"),
        ({"computed_tokens": 4}, "computed_tokens 4, not 3"),
        ({"sampled_seqs": []}, r"sampled_seqs \[\], not \[1\]"),
        ({"sampled_seqs": [1, 1]}, r"sampled_seqs \[1, 1\], not \[1\]"),
        ({"sampled_tokens": []}, "not as many"),
        ({"sampled_tokens": [256]}, "sampled token 256"),
        ({"threads": 65537}, "threads 65537, at most 65536"),
        ({"logprobs": [pb.SampledLogprobs(seq_id=1)]}, r"logprobs of sequences \[1\], not \[\]"),
        ({"sampled_seqs": [], "failed_seqs": [1], "failed_reasons": [1]}, r"sequences \[1\] failed, and nothing"),
    ],
)
def test_a_result_that_is_not_as_its_step(kit: Kit, result: dict[str, Any], words: str) -> None:
    with kit.epoch() as epoch:
        _sent(epoch)
        values: dict[str, Any] = {"step": 1, "sampled_seqs": [1], "sampled_tokens": [0], "computed_tokens": 3, **result}
        epoch.call._incoming.get()
        epoch.call._incoming.put(pb.StepResult(epoch=epoch.epoch, **values))
        with pytest.raises(BrokenRule, match=words):
            epoch.receive()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": -math.inf, "top_logprobs": [-1.0]}, r"log-probabilities \[-inf, -1.0\] are not finite"),
        ({"chosen": -1.0, "top_logprobs": [math.nan]}, r"log-probabilities \[-1.0, nan\] are not finite"),
        ({"top_token_ids": [256], "top_logprobs": [-1.0]}, r"likeliest tokens \[256\], the vocabulary has 256"),
    ],
)
def test_log_probabilities_that_no_manager_takes(kit: Kit, row: dict[str, Any], words: str) -> None:
    with kit.epoch() as epoch:
        _sent(epoch)
        epoch._in_flight[0][1][0].sampling.logprobs = 1
        epoch.call._incoming.get()
        logprobs = pb.SampledLogprobs(seq_id=1, **{"top_token_ids": [5], **row})
        result = pb.StepResult(epoch=epoch.epoch, step=1, sampled_seqs=[1], sampled_tokens=[0], computed_tokens=3)
        result.logprobs.append(logprobs)
        epoch.call._incoming.put(result)
        with pytest.raises(BrokenRule, match=words):
            epoch.receive()


def _sent(epoch: PlayedEpoch) -> None:
    epoch.send([epoch.sequence([1, 2, 3])])


def test_neutral_sampling_is_greedy() -> None:
    assert neutral() == pb.StepSampling(top_p=1.0, repetition_penalty=1.0)
    assert neutral(top_p=0.5).top_p == 0.5
