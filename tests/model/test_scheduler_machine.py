"""Random histories of the real scheduler and pool. Judged by the fake executor, every slot read has the right content;
over the wire, the executor's own step check accepts every step, copies, forks and beams included.
"""

import os

from hypothesis import HealthCheck, settings
from support.engine.scheduler_machine import GroupMachine, SchedulerMachine, WireMachine

_SETTINGS = settings(
    max_examples=int(os.environ.get("PAGEKV_TEST_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = _SETTINGS
TestWireMachine = WireMachine.TestCase
TestWireMachine.settings = _SETTINGS
TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = _SETTINGS
