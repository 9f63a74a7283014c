"""Each rule of the protocol notices an executor that breaks it."""

from __future__ import annotations

import pytest
from support.executor.judged import ToyFault, assert_noticed

END = "            if mine and not mine.over.done():\n                mine.over.set_result(None)\n"
POWER = "        power = 1 <="
LAST = "is None:\n                    "
FAULTS = [
    ToyFault(
        "P1",
        "Describe empties the pool",
        (
            (
                "        power = 1 <=",
                "        if self.epoch:\n            self.epoch.pool.reverse()\n        power = 1 <=",
            ),
        ),
    ),
    ToyFault("P2", "an epoch comes twice", (("max(time.time_ns(), self.last + 1)", "self.last or time.time_ns()"),)),
    ToyFault("P2", "Attach leaves the epoch before", (("            old.over.set_result", "            repr"),), 1.0),
    ToyFault("P3", "take_over is ignored", ((" and not request.take_over", ""),)),
    ToyFault("P3", "any manager takes over", (("old.manager != request.manager_id", "False"),)),
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
    ToyFault("P12", "the sampler has no name", (('sampler="toy-1"', 'sampler=""'),)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_faults_are_noticed(fault: ToyFault) -> None:
    assert_noticed(fault)
