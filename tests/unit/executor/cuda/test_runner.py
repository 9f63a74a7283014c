"""Steps of the cuda backend, over the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.executor.broken_sequence import KINDS, check_fails_alone
from support.executor.cpu_driver import Driver, prompts_of
from support.executor.cuda_host import HostDevice, host_backend
from support.executor.executor_steps import ALL_FEATURES, new_sequence

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cuda import graphs
from pagekv.executor.cuda.backend import CudaBackend
from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.step import Step
from pagekv.executor.session.step_check import EpochLimits


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([3, 99], r"block_tables: block 99 .*must be in \[0, 8\)"),
        ([3, -1], "block -1"),
        ([3], "block -1 of sequence 0"),
    ],
)
def test_ids_are_checked_before_anything_is_launched(llama: Path, table: list[int], reason: str) -> None:
    backend = host_backend(llama)
    backend.allocate(4, 8, 0)
    backend.cache.device.fill_(7)
    state = SequenceState(1, [1, 2, 3, 4, 5], 5, table, 0, Sampling())
    with pytest.raises(ValueError, match=reason):
        backend.launch([Scheduled(state, 0, 5)])
    assert bool((backend.cache.device == 7).all())


def test_more_input_than_the_buffer_holds(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer moves, and what was recorded over the old one is not replayed."""
    monkeypatch.setattr("pagekv.executor.cuda.runner.UPLOAD_WORDS", 128)
    prompts = prompts_of([3, 30])
    expected = [_alone(host_backend(llama), prompt) for prompt in prompts]
    backend = host_backend(llama)
    driver = Driver(backend, 16)
    states = [driver.sequence(prompt) for prompt in prompts]
    driver.generate(states[:1], 5)
    assert driver.generate(states, 8) == expected


def _alone(backend: CudaBackend, prompt: list[int]) -> list[int]:
    driver = Driver(backend, 16)
    return driver.generate([driver.sequence(prompt)], 8)[0]


def test_steps_of_an_epoch_launched_ahead(llama: Path) -> None:
    """Through checks and bookkeeping of real steps: enter, decode twice ahead, leave; a later sequence gets its handle,
    its id and its blocks."""
    backend = host_backend(llama, max_sequences=1)
    backend.allocate(4, 8, 0)
    epoch = Epoch(1, "m", EpochLimits(4, 8, 0, 256, 256, 1, 128, ALL_FEATURES), backend)
    prompts = prompts_of([5, 6])
    outputs = []
    step = 0
    for prompt in prompts:
        sampling = Sampling(frequency_penalty=0.5)
        entering = new_sequence(3, prompt, [1, 2, 3], sampling=sampling)
        steps = [
            Step(
                1,
                step + 1,
                finished_seqs=[3] if step else [],
                new_seqs=[entering],
                scheduled_seqs=[3],
                scheduled_tokens=[len(prompt)],
            )
        ]
        steps += [Step(1, step + number) for number in (2, 3, 4)]
        step += 4
        launched = [epoch.launch(one) for one in steps]
        reports = [one.collect() for one in launched]
        outputs.append([report.sampled[3].token_id for report in reports])
    for prompt, output in zip(prompts, outputs, strict=True):
        driver = Driver(host_backend(llama), 4)
        expected = driver.generate([driver.sequence(prompt, sampling=Sampling(frequency_penalty=0.5))], 4)
        assert [output] == expected


def test_graphs_leave_their_logits_in_one_buffer(llama: Path) -> None:
    """The logits of each graph lie in the runner's buffer, not in memory of the graph; and all are recorded before
    the first step."""
    returned: list[int] = []

    class Watching(HostDevice):
        def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            returned.append(function().data_ptr())
            return super().capture(function)

    backend = host_backend(llama, Watching(), max_sequences=3)
    driver = Driver(backend, 16)
    before = len(returned)
    for count in (1, 2):
        states = [driver.sequence(prompt) for prompt in prompts_of([3, 4][:count])]
        driver.generate(states, 4)
        backend.finish(states)
    assert len(returned) == before == backend.runner.graphs.num_captured > 2
    assert backend.runner.graphs.num_replayed > 0
    assert set(returned) == {backend.runner.graph_logits.data_ptr()}


def test_more_sequences_than_the_largest_graph_has_are_computed_without_one(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPH_BATCH", 2)
    backend = host_backend(llama, max_sequences=3)
    driver = Driver(backend, 16)
    for count, replayed in ((2, 3), (3, 0)):
        before = backend.runner.graphs.num_replayed
        states = [driver.sequence(prompt) for prompt in prompts_of([3] * count)]
        assert all(len(output) == 4 for output in driver.generate(states, 4))
        backend.finish(states)
        assert backend.runner.graphs.num_replayed - before == replayed


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_whose_logits_are_not_numbers_fails_alone(llama: Path, kind: Sampling, graphs: bool) -> None:
    check_fails_alone(host_backend(llama, max_sequences=4, graphs=graphs), kind, ahead=True)


class _MarkedDevice(HostDevice):
    """A wait for a mark brings into page-locked memory what was enqueued before the mark, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[torch.Tensor] = []

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.locked.append(torch.zeros(shape, dtype=dtype))
        return self.locked[-1]

    def mark(self) -> Callable[[], None]:
        before = [tensor.clone() for tensor in self.locked]

        @torch.inference_mode()
        def wait() -> None:
            for tensor in self.locked[len(before) :]:
                tensor.zero_()
            for tensor, filled in zip(self.locked, before, strict=False):
                tensor.copy_(filled)

        return wait


@pytest.mark.parametrize("graphs", [False, True])
def test_a_steps_mark_is_behind_its_copies_to_the_host(llama: Path, graphs: bool) -> None:
    kind, prompt = Sampling(logprobs=2), prompts_of([5])[0]
    found = []
    for device in (HostDevice(), _MarkedDevice()):
        driver = Driver(host_backend(llama, device, max_sequences=2, graphs=graphs), 16)
        tokens = driver.generate([driver.sequence(prompt, sampling=kind)], 4)[0]
        state = SequenceState(9, [*prompt, *tokens], 5, [0], 0, kind)
        found.append((tokens, driver.backend.launch([Scheduled(state, 0, 9)]).collect()))
    assert any(found[0][0])
    assert found[0] == found[1]
