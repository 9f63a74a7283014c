"""Log-probabilities, against NumPy; of equal logits the first tokens count as the likeliest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagekv.executor.cuda.logprobs import first_of_largest, log_probabilities


@pytest.mark.parametrize("num_top", [0, 1, 4, 9])
def test_they_are_those_of_the_softmax_best_first(num_top: int) -> None:
    torch.manual_seed(0)
    # Few values, so that many are equal.
    raw = torch.randint(-3, 4, (20, 9)).double()
    tokens = torch.randint(0, 9, (20,))
    of_tokens, ids, values = log_probabilities(raw, tokens, num_top)
    numbers = raw.numpy()
    expected = numbers - np.log(np.exp(numbers).sum(1, keepdims=True))
    rows = np.arange(20)
    assert np.allclose(of_tokens.numpy(), expected[rows, tokens.numpy()], rtol=0, atol=1e-12)
    order = np.argsort(-numbers, axis=1, kind="stable")[:, :num_top]
    assert np.array_equal(ids.numpy(), order)
    assert np.allclose(values.numpy(), np.take_along_axis(expected, order, 1), rtol=0, atol=1e-12)


def test_each_row_may_want_another_number() -> None:
    values = torch.tensor([[1.0, 3, 3, 2], [5, 5, 5, 5]])
    kept = first_of_largest(values, torch.tensor([[3.0], [5.0]]), torch.tensor([[1], [3]]))
    assert kept.tolist() == [[False, True, False, False], [True, True, True, False]]
