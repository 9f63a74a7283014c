"""A step travels as differences: what a steady decode of 256 sequences takes on the wire, both ways."""

from __future__ import annotations

import pytest
from split_messages import decode_plans, measure

from pagekv.kvmanager.engine.executor_wire import step_request

RUNNING = 256
BOUND_BYTES = 2048


def test_the_messages_of_256_decodes_are_under_2_kilobytes() -> None:
    """Also where all of them begin a block in one step, and with token ids of three bytes."""
    request, together, result = measure(RUNNING, 32)
    # Sixteen new blocks a step: two columns of at most three bytes, and the head.
    assert request.most_bytes < 128
    assert together.most_bytes < BOUND_BYTES
    assert result.most_bytes < BOUND_BYTES


@pytest.mark.parametrize("running", [16, 128])
def test_a_step_in_which_no_block_begins_names_nobody(running: int) -> None:
    plans = decode_plans(running, 32, spread=False)
    sizes = {len(step_request(plan, 2**60, 5, ()).SerializeToString()) for plan in plans if not plan.append_seq_ids}
    assert len(sizes) == 1
    assert sizes.pop() < 16
