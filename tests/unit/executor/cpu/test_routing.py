"""The choices of routers are kept, repeated and compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagekv.executor.cpu.routing import Routing

CHOSEN, WEIGHTS = torch.tensor([[0, 2], [1, 3], [2, 3]]), torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]])


class Told(nn.Module):
    """Experts that give what they are told."""

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return chosen, weights


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts: nn.Module = Told()


@pytest.fixture
def model() -> nn.ModuleList:
    return nn.ModuleList([Mixture(), Mixture()])


def call(model: nn.ModuleList, chosen: torch.Tensor, weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [mixture.experts(torch.ones(len(chosen), 1), chosen, weights) for mixture in model]  # type: ignore[operator]  # torch's types


def kept(model: nn.ModuleList) -> Routing:
    routing = Routing(model)
    with routing.kept():
        call(model, CHOSEN, WEIGHTS)
        call(model, CHOSEN.flip(0), WEIGHTS)
    return routing


def test_experts_get_what_was_kept_in_its_order_whoever_takes_their_place(model: nn.ModuleList) -> None:
    routing = kept(model)
    for mixture in model:
        mixture.experts = Told()
    # Of the first row one of the experts differs, and the order of others.
    other = torch.tensor([[0, 1], [3, 1], [3, 2]])
    with routing.repeated():
        first, second = (call(model, other, WEIGHTS) for _ in range(2))
    for (chosen, weights), (later, _) in zip(first, second, strict=True):
        assert torch.equal(chosen, CHOSEN)
        assert torch.equal(weights, WEIGHTS)
        assert torch.equal(later, CHOSEN.flip(0))
    assert torch.equal(call(model, other, WEIGHTS)[0][0], other)


def test_of_fewer_rows_those_that_the_step_samples(model: nn.ModuleList) -> None:
    routing = kept(model)
    routing.sampled = [0, 2]
    with routing.repeated():
        found = call(model, CHOSEN[[0, 2]], WEIGHTS[[0, 2]])
    assert torch.equal(found[0][0], CHOSEN[[0, 2]])
    assert routing.agrees


@pytest.mark.parametrize(
    ("chosen", "weights", "agrees"),
    [
        (CHOSEN, WEIGHTS, True),
        (CHOSEN.flip(1), WEIGHTS.flip(1), True),
        (torch.tensor([[0, 2], [1, 2], [2, 3]]), WEIGHTS, True),
        (CHOSEN.flip(1), WEIGHTS, False),
        ((CHOSEN + 1) % 4, WEIGHTS, False),
        (CHOSEN, 2 * WEIGHTS, False),
        (CHOSEN, WEIGHTS * torch.nan, False),
    ],
)
def test_few_rows_may_have_other_experts(
    model: nn.ModuleList, chosen: torch.Tensor, weights: torch.Tensor, agrees: bool
) -> None:
    routing = kept(model)
    with routing.repeated():
        call(model, chosen, weights)
    assert routing.agrees == agrees


def test_experts_that_are_called_otherwise_are_left_alone() -> None:
    class Other(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * rows

    mixture, rows = Mixture(), torch.ones(3, 1)
    mixture.experts = Other()
    routing = Routing(mixture)
    with routing.kept():
        mixture.experts(rows)
    with routing.repeated():
        assert torch.equal(mixture.experts(rows), 2 * rows)
    assert routing.agrees
    assert Routing(nn.Linear(1, 1)).agrees
