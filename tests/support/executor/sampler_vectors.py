"""The test vectors of the sampler "pagekv-1", as DESIGN.md has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.documentation import ROOT

from pagekv.executor.backend.interface import Sampling, SequenceState

LOGITS = [0.5, 2.0, -1.0, 2.0, 0.0, 1.5, 3.0, -2.0]
NUM_SEEDS = 10


def table(last_column: str) -> list[list[str]]:
    """The rows of the table of section 4 whose last column has this title."""
    section = (ROOT / "DESIGN.md").read_text().partition('### The sampler "pagekv-1"')[2].partition("\n## ")[0]
    lines = section.partition(f" {last_column} |\n")[2].splitlines()[1:]
    rows = lines[: lines.index("")] if "" in lines else lines
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def draws() -> Iterator[tuple[list[SequenceState], list[int]]]:
    """Sequences at position 3 with the seeds from 0, of each row one list, and the tokens that `LOGITS` give them."""
    for options, tokens in table("tokens with seeds 0 to 9"):
        values: dict[str, Any] = {}
        for option in options.strip("`").split():
            name, _, text = option.partition("=")
            value = float(text)
            ids = name in ("bias_token_ids", "banned_until_min")
            values[name] = (int(value),) if ids else (value,) if name == "biases" else value
        for name in ("top_k", "min_tokens"):
            values[name] = int(values.get(name, 0))
        states = [SequenceState(seed, [1, 3, 6], 2, [], 0, Sampling(**values, seed=seed)) for seed in range(NUM_SEEDS)]
        yield states, [int(token) for token in tokens.split()]
