"""Beam search through both processes finds what transformers' `generate(num_beams=...)` finds, in float32, token for
token, whatever runs beside it and however little room there is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.clients.calls import Caller
from support.clients.gate import at_once
from support.clients.stack import Process, Stack, running_executor, running_manager
from support.executor.cpu_driver import prompts_of, reference, save_model

from pagekv.client import AsyncPageKVClient, Completion, Stats

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NEW = 12
# Common in this model's best hypotheses, so that searches end early and in the middle.
EOS, STOP = 190, 117


@dataclass(frozen=True)
class Search:
    """One search, as the client library asks for it and as transformers does."""

    prompt: list[int]
    width: int
    n: int
    options: dict[str, Any] = field(default_factory=dict)

    def ends(self) -> list[int]:
        """Tokens that end a hypothesis."""
        return [*self.options.get("stop_token_ids", []), *([] if self.options.get("ignore_eos") else [EOS])]

    def reference(self, model: Any) -> list[tuple[list[int], float]]:
        """Transformers' results, best first: tokens up to the end token, and the sum of their log-probabilities."""
        ids, ends = torch.tensor([self.prompt]), self.ends()
        options = {**self.options, "min_new_tokens": self.options.get("min_tokens", 0)}
        for ours in ("stop_token_ids", "ignore_eos", "min_tokens"):
            options.pop(ours, None)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=self.width,
                num_return_sequences=self.n,
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=ends or None,
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
        rows = out.sequences[:, len(self.prompt) :].tolist()
        cut = [row[: next((at for at, t in enumerate(row) if t in ends), NEW) + 1] for row in rows]
        penalty = self.options.get("length_penalty", 1.0)
        scores = out.sequences_scores.tolist()
        return [(tokens, score * len(tokens) ** penalty) for tokens, score in zip(cut, scores, strict=True)]


def searches() -> list[Search]:
    """Every option, over prompts that begin alike and part in the middle of a block."""
    common, *tails = prompts_of([19, 2, 9, 14, 30], seed=3)
    family = [[*common, *tail] for tail in tails]
    short = prompts_of([1, 4, 16, 17], seed=4)
    return [
        Search(family[0], 4, 4),
        Search(family[1], 4, 3, {"length_penalty": 0.0}),
        Search(family[2], 2, 1, {"length_penalty": -1.5}),
        Search(family[3], 2, 2, {"early_stopping": True}),
        Search(short[0], 4, 4, {"stop_token_ids": [STOP]}),
        Search(short[1], 2, 2, {"min_tokens": 7, "stop_token_ids": [STOP], "length_penalty": 0.0}),
        Search(short[2], 4, 2, {"ignore_eos": True, "length_penalty": 2.0}),
        Search(short[3], 4, 4, {"min_tokens": NEW, "early_stopping": True}),
        Search(short[1], 6, 5, {"stop_token_ids": [STOP, 88], "length_penalty": 0.5}),
    ]


@dataclass(frozen=True)
class World:
    """An executor with a small model, what transformers finds with it, and what runs beside the searches."""

    executor: Process
    searches: list[Search]
    references: list[list[tuple[list[int], float]]]
    greedy: list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small work: threads would wait for one another
    model = save_model("llama", directory)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": EOS}))
    asked = searches()
    references = [search.reference(model) for search in asked]
    greedy = [(prompt, reference(model, prompt, 30)) for prompt in prompts_of([3, 12, 25, 40], seed=6)]
    torch.set_num_threads(threads)
    # The comparison is worth something: hypotheses end in every way.
    ends = [tokens[-1] for found in references for tokens, _ in found]
    lengths = [len(tokens) for found in references for tokens, _ in found]
    assert {EOS, STOP} <= set(ends)
    assert min(lengths) < 5
    assert max(lengths) == NEW
    args = ["--model", str(directory), "--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB"]
    with running_executor([*args, "--max-sequences", "8"], gated=True) as executor:
        yield World(executor, asked, references, greedy)


async def run_all(stack: Stack, world: World) -> tuple[list[tuple[Completion, ...]], list[Completion], Stats]:
    """The searches and the others at once; results, and statistics when all are done."""
    async with AsyncPageKVClient(stack.target) as client, Caller(stack.target) as caller:
        searches = [
            client.generate_n(s.prompt, s.n, beam_width=s.width, max_tokens=NEW, **s.options) for s in world.searches
        ]
        others = [
            client.generate_n(prompt, 1, max_tokens=30, temperature=0, ignore_eos=True) for prompt, _ in world.greedy
        ]
        # All of the others are admitted, and have no room to grow in a small pool.
        found = await at_once(stack.gate, caller, [*others, *searches])
        await caller.idle_stats()
        return found[len(others) :], [other for (other,) in found[: len(others)]], await client.stats()


def check(world: World, found: list[tuple[Completion, ...]], others: list[Completion]) -> None:
    for search, wanted, results in zip(world.searches, world.references, found, strict=True):
        assert [list(result.token_ids) for result in results] == [tokens for tokens, _ in wanted], search
        assert [result.index for result in results] == list(range(search.n))
        for result, (tokens, logprob) in zip(results, wanted, strict=True):
            assert result.cumulative_logprob == pytest.approx(logprob, rel=1e-4)
            assert result.finish_reason == ("stop" if tokens[-1] in search.ends() else "length")
            assert result.stop_token_id == (tokens[-1] if tokens[-1] in search.ends() else None)
            assert result.completion_tokens == len(tokens)
            assert result.prompt_tokens == len(search.prompt)
    assert [list(other.token_ids) for other in others] == [tokens for _, tokens in world.greedy]


CONFIGURATIONS = {
    "as it comes": [],
    "block 1": ["--block-size", "1", "--pipeline-depth", "1"],
    "block 4, one step at a time, no partial hits": [
        *("--block-size", "4", "--pipeline-depth", "1", "--no-partial-hits")
    ],
    "nothing cached": ["--block-size", "4", "--no-prefix-cache"],
    "shared between requests alone": ["--block-size", "16", "--no-fork-sharing"],
    "chunks of three tokens": ["--block-size", "4", "--max-batch-tokens", "3"],
    "six slots": ["--block-size", "4", "--max-running", "6", "--max-batch-tokens", "9"],
}


@pytest.mark.parametrize("args", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_searches_at_once_find_what_transformers_finds(args: list[str], world: World) -> None:
    with running_manager(world.executor, ["--tokenizer", "none", *args]) as stack:
        for warm in (False, True):
            found, others, stats = asyncio.run(run_all(stack, world))
            check(world, found, others)
            cached = sum(result.cached_tokens for results in found for result in results)
            if warm:
                assert (cached > 0) == ("--no-prefix-cache" not in args)
            assert (stats.active_blocks, stats.running_sequences, stats.waiting_sequences) == (0, 0, 0)
            assert stats.executor_restarts_total == 0
        assert stats.free_blocks == stats.num_device_blocks


# The need of the largest search, 4 beams of 28 + 12 tokens, and not a block more.
SMALL = {
    "block 1": ["--block-size", "1", "--num-device-blocks", "156", "--pipeline-depth", "1"],
    "block 4": ["--block-size", "4", "--num-device-blocks", "40"],
    "block 4, nothing cached, a watermark": [
        *("--block-size", "4", "--num-device-blocks", "40", "--no-prefix-cache", "--watermark", "0.3")
    ],
    "block 16, chunks, nothing shared": [
        *("--num-device-blocks", "12", "--no-fork-sharing", "--max-batch-tokens", "5")
    ],
}


@pytest.mark.parametrize("args", SMALL.values(), ids=SMALL.keys())
def test_a_pool_that_holds_one_search_serves_all_unchanged(args: list[str], world: World) -> None:
    with running_manager(world.executor, ["--tokenizer", "none", *args]) as stack:
        found, others, stats = asyncio.run(run_all(stack, world))
        check(world, found, others)
        assert stats.preemptions_total > 0
        assert stats.active_blocks == 0
        assert stats.executor_restarts_total == 0
