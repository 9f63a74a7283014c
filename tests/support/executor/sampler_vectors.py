"""The test vectors of the sampler "pagekv-2", as DESIGN.md has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.documentation import ROOT

from pagekv.executor.backend.interface import Sampling, SequenceState

NUM_SEEDS = 10
# The logits of each table of tokens, by the title of its last column.
LOGITS = {
    "tokens with seeds 0 to 9": [0.5, 2.0, -1.0, 2.0, 0.0, 1.5, 3.0, -2.0],
    "tokens of 1,000 with seeds 0 to 9": [token_id % 7 / 2 for token_id in range(1000)],
}


def table(last_column: str) -> list[list[str]]:
    """The rows of the table of section 4 whose last column has this title."""
    section = (ROOT / "DESIGN.md").read_text().partition('### The sampler "pagekv-2"')[2].partition("\n## ")[0]
    lines = section.partition(f" {last_column} |\n")[2].splitlines()[1:]
    rows = lines[: lines.index("")] if "" in lines else lines
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def draws() -> Iterator[tuple[list[float], list[SequenceState], list[int]]]:
    """Logits; sequences at position 3 with the seeds from 0, of each row of a table one list; and the tokens that the
    logits give them.
    """
    for column, logits in LOGITS.items():
        for options, tokens in table(column):
            yield logits, _states(options), [int(token) for token in tokens.split()]


def _states(options: str) -> list[SequenceState]:
    values: dict[str, Any] = {}
    for option in options.strip("`").split():
        name, _, text = option.partition("=")
        value = float(text)
        ids = name in ("bias_token_ids", "banned_until_min")
        values[name] = (int(value),) if ids else (value,) if name == "biases" else value
    for name in ("top_k", "min_tokens"):
        values[name] = int(values.get(name, 0))
    return [SequenceState(seed, [1, 3, 6], 2, [], 0, Sampling(**values, seed=seed)) for seed in range(NUM_SEEDS)]
