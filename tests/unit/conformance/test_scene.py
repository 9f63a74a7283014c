"""The epoch that a bad step comes into, and steps that cannot be tried."""

from __future__ import annotations

import pytest
from support.executor.judged import kit_of, toy

from pagekv.conformance.scene import BadStep, LiveScene
from pagekv.conformance.verdict import BrokenRule, NotTested
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_a_step_that_is_good_is_no_refusal() -> None:
    with toy() as address, kit_of(address) as kit:
        kit.answers.prepare()
        with pytest.raises(BrokenRule, match="an empty step: step 2 was accepted"):
            BadStep("an empty step", {}, []).check(kit, "R1")
        assert LiveScene(kit).written == 1
        with pytest.raises(BrokenRule, match=r"a block: names the field new_seqs\[0\].block_ids, not step"):
            BadStep("a block", lambda s: s.entering(block_ids=[s.written]), ["step"]).check(kit, "R32")
        BadStep("a block", lambda s: s.entering(block_ids=[s.written]), ["new_seqs[0].block_ids"]).check(kit, "R32")


def test_a_step_is_not_tried_without_the_feature_or_the_blocks_that_it_needs() -> None:
    with toy() as address, kit_of(address) as kit:
        with pytest.raises(NotTested, match="no host_pool"):
            BadStep("words", {}, [], needs=pb.EXECUTOR_FEATURE_HOST_POOL).check(kit, "R7")
        with pytest.raises(NotTested, match="needs 999999 blocks, the pool has 8192"):
            BadStep("words", {}, [], num_blocks=lambda s: 999999).check(kit, "R14")
