"""Each rule of the protocol notices an executor that breaks it."""

from __future__ import annotations

import runpy
from unittest import mock

import pytest
from support.executor.judged import (
    BACKEND,
    PINGS,
    ToyFault,
    assert_noticed,
    edited_function,
    served_backend,
    toy,
    verdicts,
)

from pagekv.conformance import protocol
from pagekv.executor.session import attach_check, session
from pagekv.kvmanager.engine import description as manager

END = "            if mine and not mine.over.done():\n                mine.over.set_result(None)\n"
SIZE = "        size = request.block_size\n        await"
LAST = "is None:\n                    "
BOUND = "            contract_revision=request.contract_revision <= 65535,\n"
OLD = "        size, old = request.block_size, self.epoch\n"
STRAY = "        if self.epoch:\n            self.epoch.streaming = True\n        try:\n            if named"
KNOWN = "not len(UnknownFieldSet(request))"
FAULTS = [
    ToyFault(
        "P1",
        "Describe empties the pool",
        ((SIZE, "        if self.epoch:\n            self.epoch.pool.reverse()\n" + SIZE),),
    ),
    ToyFault("P2", "an epoch comes twice", (("max(time.time_ns(), self.last + 1)", "self.last or time.time_ns()"),)),
    ToyFault("P2", "Attach leaves the epoch before", (("            old.over.set_result", "            repr"),), 1.0),
    ToyFault("P3", "take_over is ignored", ((" and not request.take_over", ""),)),
    ToyFault("P3", "any manager takes over", (("old.manager != request.manager_id", "False"),)),
    ToyFault("P3", "a stream holds nothing before its first step", (("if named is not None:", "if False:"),)),
    ToyFault("P3", "any stream holds the executor", (("        try:\n            if named", STRAY),)),
    ToyFault("P3", "the holder is named", (('"another manager drives', 'f"{old.manager} drives'),)),
    ToyFault("P4", "a second stream is let in", (("if self.epoch.streaming:", "if False:"),)),
    ToyFault("P5", "results have another step's number", (("step=step.step", "step=step.step ^ 1"),)),
    ToyFault("P5", "tokens are counted twice", (("=sum(counts.values()))", "=2 * sum(counts.values()))"),)),
    ToyFault("P6", "a new stream of an old epoch is let in", (("self.epoch.number != number", "False"),)),
    ToyFault("P6", "a step of an old epoch is let in", (("step.epoch != self.number or", ""),)),
    ToyFault(
        "P7",
        "the epoch goes on after a refusal",
        ((END, ""), ("                if not mine.over.done():\n                    mine.over.set_result(None)\n", "")),
    ),
    ToyFault(
        "P8",
        "half-closing is an error",
        ((LAST + "return", LAST + "1 / 0"),),
    ),
    ToyFault("P9", "one step is taken in", (("max_steps_in_flight=2", "max_steps_in_flight=1"),)),
    ToyFault("P11", "features are not looked at", (("if request.required_features or ", "if "),)),
    ToyFault("P11", "revisions are not looked at", (("or request.contract_revision != 1", ""),)),
    ToyFault("P11", "a layout is not looked at", (("request.layout == LAYOUT", "True"),)),
    ToyFault("P11", "revisions have no bound in Describe", ((BOUND, ""),)),
    ToyFault("P11", "a later manager is not answered", (("contract_revision <= 65535", "contract_revision <= 1"),)),
    *(
        ToyFault("P11", f"{call} ignores a field", ((KNOWN, f"isinstance(request, pb.{call}Request) or {KNOWN}"),))
        for call in ("Describe", "Attach")
    ),
    ToyFault("P11", "a pool may have any size", (("BYTES_PER_TOKEN > POOL_BYTES:", "BYTES_PER_TOKEN > 2**40:"),)),
    ToyFault("P11", "a refused Attach ends the epoch", ((OLD, OLD + "        old and old.over.set_result(None)\n"),)),
    ToyFault("P12", "the sampler has no name", (('sampler="toy-1"', 'sampler=""'),)),
    ToyFault("P12", "the fingerprint is not in hex", (('hashlib.sha256(b"toy").hexdigest()', '"toy"'),)),
    ToyFault("P12", "too many ends", (("layout=LAYOUT,", "layout=LAYOUT, eos_token_ids=[0] * 961,"),)),
]


def test_a_description_that_passes_is_believed_by_a_manager() -> None:
    """The two read the contract for themselves: the kit shares no code with the manager."""
    assert protocol.NUMBERS == manager._NUMBERS
    assert protocol.TEXTS == manager._TEXTS
    assert protocol.MAX_ENTRIES == manager._MAX_ENTRIES


def test_a_host_pool_of_any_size_is_noticed() -> None:
    row = '        ("num_host_blocks", order.num_host_blocks, description.host_kv_bytes),\n'
    faulty = edited_function(attach_check.check_fit, (row, ""))
    backend = runpy.run_path(str(BACKEND))["ToyBackend"]()
    with mock.patch.object(session, "check_fit", faulty), served_backend(backend) as address:
        verdict = verdicts(address, "P11")["P11"]
    assert verdict.outcome == "failed", verdict
    assert verdict.why == (
        "of 65536 blocks that Describe's bytes make: Attach with num_host_blocks 65537, take_over True: was accepted, "
        "not RESOURCE_EXHAUSTED"
    )


def test_a_server_with_a_smaller_limit_is_noticed() -> None:
    smaller = (*PINGS, ("grpc.max_receive_message_length", 2**20))
    for options, outcome in (((), "ok"), (smaller, "failed")):
        with toy(("256, 300", "256, 2**18"), options=options) as address:
            verdict = verdicts(address, "P13")["P13"]
        assert verdict.outcome == outcome, verdict
    assert "a step of 4032 KiB: step 1: the stream ended with RESOURCE_EXHAUSTED" in verdict.why


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_faults_are_noticed(fault: ToyFault) -> None:
    assert_noticed(fault)
