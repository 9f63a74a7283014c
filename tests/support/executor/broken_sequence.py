"""A sequence whose logits are not numbers, among others, on either model backend."""

from __future__ import annotations

import math
from typing import Protocol

from support.executor.cpu_driver import VOCAB, Driven, prompts_of
from support.executor.executor_steps import ALL_FEATURES, new_sequence

from pagekv.executor.backend.interface import Backend, Sampled, Sampling
from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.step_check import EpochLimits

# Of its sampling: the plainest, and one that needs every part of the sampler.
KINDS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=9, top_p=0.8, min_p=0.01, seed=3, logprobs=2, frequency_penalty=1.0),
]
BROKEN, MATES = 2, (1, 3)


class BrokenBackend(Backend, Driven, Protocol):
    """A backend whose pools a test may write to."""


def run_with_broken(
    backend: BrokenBackend, kind: Sampling, *, broken: bool, ahead: bool
) -> tuple[list[ExecutedStep], list[dict[int, Sampled]]]:
    """Reports of five steps, and what the mates sampled in each. A sequence enters over blocks of another one, which
    hold NaN where `broken`, decodes twice beside its mates and leaves; its id enters anew. `ahead`: steps 2 to 4 are
    launched before the first of them is collected.
    """
    backend.allocate(4, 32, 0)
    backend.cache.device.fill_(0)
    epoch = Epoch(1, "m", EpochLimits(4, 32, 0, VOCAB, 256, 4, 128, ALL_FEATURES), backend)
    base, first, second, last = prompts_of([10, 7, 5, 6])
    step = Step(1, 1, new_seqs=[new_sequence(9, base, [8, 9, 10])], scheduled_seqs=[9], scheduled_tokens=[10])
    reports = [epoch.launch(step).collect()]
    if broken:
        backend.cache.device[8] = math.nan
    mate = Sampling(temperature=1.0, seed=5, logprobs=3, presence_penalty=0.5)
    entering = [
        new_sequence(1, first, [0, 1, 2]),
        new_sequence(BROKEN, base, [8, 9, 11, 12], computed=8, sampling=kind),
        new_sequence(3, second, [4, 5, 6], sampling=mate),
    ]
    steps = [
        Step(1, 2, [9], new_seqs=entering, scheduled_seqs=[1, BROKEN, 3], scheduled_tokens=[7, 2, 5]),
        Step(1, 3),
        Step(1, 4),
    ]
    if ahead:
        launched = [epoch.launch(one) for one in steps]
        reports += [one.collect() for one in launched]
    else:
        reports += [epoch.launch(one).collect() for one in steps]
    anew = new_sequence(BROKEN, last, [13, 14], sampling=kind)
    step = Step(1, 5, [BROKEN], new_seqs=[anew], scheduled_seqs=[BROKEN], scheduled_tokens=[6])
    reports.append(epoch.launch(step).collect())
    mates = [{seq: report.sampled[seq] for seq in MATES if seq in report.sampled} for report in reports]
    return reports, mates


def check_fails_alone(backend: BrokenBackend, kind: Sampling, *, ahead: bool) -> None:
    """The mates of a broken sequence, and the next owner of its id, sample what they do beside a sound one, bit for
    bit.
    """
    sound, expected = run_with_broken(backend, kind, broken=False, ahead=ahead)
    reports, mates = run_with_broken(backend, kind, broken=True, ahead=ahead)
    assert [report.failed for report in sound] == [[]] * 5
    assert [report.failed for report in reports] == [[], [BROKEN], [BROKEN], [BROKEN], []]
    assert [BROKEN in report.sampled for report in reports] == [False, False, False, False, True]
    assert [len(sampled) for sampled in mates] == [0, 2, 2, 2, 2]
    assert mates == expected
    assert reports[4].sampled[BROKEN] == sound[4].sampled[BROKEN]
