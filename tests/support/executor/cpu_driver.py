"""Small random models, transformers' own answers for them, and a driver that plays the manager for a backend."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from pagekv.executor.backend.interface import (
    BlockCopies,
    CopyDirection,
    GraphCounts,
    Launch,
    Sampling,
    Scheduled,
    SequenceState,
)

VOCAB = 256
# Wide weights: flat logits would make near ties, and the same token over and over.
SPREAD = 0.3
WINDOW = 9

# Of every small model.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_COMMON: dict[str, Any] = {**SMALL, "intermediate_size": 80, "num_hidden_layers": 3, "num_key_value_heads": 2}

MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama-mqa": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 1, "head_dim": 8}),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen3": lambda: Qwen3Config(**{**_COMMON, "head_dim": 16}),
    "mistral": lambda: MistralConfig(**{**_COMMON, "sliding_window": WINDOW}),
    # Layers alternate between a window and full attention; scores and logits are capped.
    "gemma2": lambda: Gemma2Config(
        **{
            **_COMMON,
            "head_dim": 12,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 5.0,
        }
    ),
    # Layers alternate likewise; heads have sinks, and the feed-forward part has experts.
    "gpt-oss": lambda: GptOssConfig(
        **{**_COMMON, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=256,
        initializer_range=SPREAD,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
}


def edit_config(directory: Path, **fields: Any) -> None:
    """Sets fields of a saved model's config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def save_model(name: str, directory: Path, seed: int = 0) -> Any:
    """Writes a random model of MODELS to the directory and returns it, as transformers runs it."""
    return save_config(MODELS[name](), directory, seed)


def save_config(config: PreTrainedConfig, directory: Path, seed: int = 0) -> Any:
    """As `save_model`, of any configuration."""
    torch.manual_seed(seed)
    # Eager attention is transformers' reference, and the only one that caps scores.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms start at one value, which would hide a mistake with them
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(length)] for length in lengths]


def reference(model: Any, prompt: list[int], new: int) -> list[int]:
    """The greedy answer of transformers' `generate`; checks that a comparison with it proves something."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == new
    assert len(set(tokens)) > 1, "a constant answer proves nothing"
    best = torch.cat(out.scores).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-4, "nearly equal logits: rounding would decide; take another seed"
    return tokens


class Pools(Protocol):
    """Both pools, blocks first."""

    device: torch.Tensor
    host: torch.Tensor


class Driven(Protocol):
    """As much of a backend with pools as is needed here."""

    @property
    def cache(self) -> Pools: ...
    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> GraphCounts | None: ...
    def copy_blocks(self, copies: BlockCopies) -> None: ...
    def launch(self, scheduled: list[Scheduled]) -> Launch: ...
    def finish(self, states: list[SequenceState]) -> None: ...


class Driver:
    """Gives blocks in random order, runs steps, appends what is sampled. The pool starts out full of NaN."""

    def __init__(self, backend: Driven, block_size: int = 4, num_blocks: int = 400, host_blocks: int = 0) -> None:
        backend.allocate(block_size, num_blocks, host_blocks)
        backend.cache.device[:num_blocks] = math.nan
        backend.cache.host.fill_(math.nan)
        self.backend, self.block_size = backend, block_size
        self.free = list(range(num_blocks))
        random.Random(num_blocks).shuffle(self.free)
        self._ids = iter(range(10**6))

    def sequence(
        self, tokens: list[int], num_prompt: int | None = None, sampling: Sampling | None = None
    ) -> SequenceState:
        """A new sequence without blocks."""
        prompt = len(tokens) if num_prompt is None else num_prompt
        return SequenceState(next(self._ids), list(tokens), prompt, [], 0, sampling or Sampling())

    def share(self, owner: SequenceState, other: SequenceState, num_tokens: int) -> None:
        """A prefix hit: `other` starts on the full blocks of `owner` that hold the first `num_tokens`."""
        assert num_tokens % self.block_size == 0
        other.block_table = owner.block_table[: num_tokens // self.block_size]
        other.computed_tokens = num_tokens

    def preempt(self, state: SequenceState) -> None:
        """Drops the sequence's blocks: everything is computed again, elsewhere."""
        self.backend.finish([state])
        # Poison: a sequence that still reads here gets NaN.
        self.backend.cache.device[state.block_table] = math.nan
        self.free[:0] = state.block_table
        state.block_table, state.computed_tokens = [], 0

    def swap_out_and_in(self, state: SequenceState) -> None:
        """Moves the sequence to the host pool and back into other blocks."""
        self.backend.finish([state])
        host = list(range(len(state.block_table)))[::-1]
        self.backend.copy_blocks(BlockCopies(CopyDirection.SWAP_OUT, state.block_table, host))
        self.backend.cache.device[state.block_table] = math.nan
        self.free[:0] = state.block_table
        state.block_table = [self.free.pop() for _ in host]
        self.backend.copy_blocks(BlockCopies(CopyDirection.SWAP_IN, host, state.block_table))

    def step(self, counts: dict[int, int], states: list[SequenceState]) -> None:
        """One step: `counts` tokens of each state by seq_id (0: sits out), as many as it has if that is less."""
        scheduled = []
        for state in states:
            count = min(counts[state.seq_id], len(state.token_ids) - state.computed_tokens)
            if count == 0:
                continue
            while len(state.block_table) * self.block_size < state.computed_tokens + count:
                state.block_table.append(self.free.pop())
            scheduled.append(Scheduled(state, state.computed_tokens, count))
        sampled = self.backend.launch(scheduled).collect() if scheduled else {}
        assert set(sampled) == {item.state.seq_id for item in scheduled if item.samples}
        for item in scheduled:
            item.state.computed_tokens += item.count
            if item.state.seq_id in sampled:
                item.state.token_ids.append(sampled[item.state.seq_id].token_id)

    def generate(self, states: list[SequenceState], new: int, chunk: int = 10**6) -> list[list[int]]:
        """Runs all together until each has `new` tokens, at most `chunk` tokens of each per step."""
        while left := [state for state in states if len(self.output(state)) < new]:
            self.step({state.seq_id: chunk for state in left}, left)
        return [self.output(state) for state in states]

    @staticmethod
    def output(state: SequenceState) -> list[int]:
        """The tokens generated so far."""
        return list(state.token_ids[state.num_prompt_tokens :])
