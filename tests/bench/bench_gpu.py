"""The executor and the whole stack on one GPU: a model of Llama 3 8B's shape with random bf16 weights.

Tokens per second in process at batch 1, 32 and 256, with and without CUDA graphs; the same through both processes,
which gives what the split costs a step (floor: under 2 %); and transformers' continuous batching of the same model. All
on the same card in one run, one after the other: a second model would not leave the memory as it is.

A step's time is the difference of a long and a short run over the difference of their steps, so that prefill, start and
end of a run do not count. Needs a GPU, 16 GB of disk for the weights, and about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import stack as processes
import torch
from calls import Caller, request_for
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pagekv.executor.backend import UNKNOWN_TOKEN, Launch, Sampling, Scheduled, SequenceState
from pagekv.executor.cuda.backend import CudaBackend

BLOCK_SIZE = 16
TOKEN_BUDGET = 2048
PROMPT_TOKENS = 128
SHORT, LONG = 16, 144
"""New tokens of the two runs whose difference is measured."""
DEPTH = 2
"""Steps in flight, as the manager keeps them."""
SPLIT_FLOOR = 0.02

Prompts = list[list[int]]


def llama_3_8b(layers: int = 32) -> LlamaConfig:
    """The shape of Llama 3 8B."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    )


def write_model(directory: Path, config: LlamaConfig, device: torch.device) -> None:
    """Configuration and random bf16 weights, a file a layer, without ever holding the model."""
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    files: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = shape
    where = {}
    for file, tensors in files.items():
        made = {}
        for name, shape in tensors.items():
            tensor = torch.ones(shape, device=device) if len(shape) == 1 else torch.randn(shape, device=device) * 0.02
            made[name] = tensor.to(torch.bfloat16).cpu()
            where[name] = file
        save_file(made, directory / file, metadata={"format": "pt"})
    total = sum(shape.numel() * 2 for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def prompts_for(batch: int, vocab_size: int, seed: int) -> Prompts:
    """Different in every run, so that no prefix is cached."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


class InProcess:
    """Plays the manager for a backend: prompts under the token budget first, then decodes, two steps in flight."""

    def __init__(self, backend: CudaBackend, prompts: Prompts, new: int) -> None:
        blocks = iter(range(len(prompts) * -(-(PROMPT_TOKENS + new) // BLOCK_SIZE)))
        self._backend, self._new = backend, new
        self._flying: deque[Launch] = deque()
        self.outputs: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        self.states = []
        for index, prompt in enumerate(prompts):
            table = [next(blocks) for _ in range(-(-(len(prompt) + new) // BLOCK_SIZE))]
            self.states.append(SequenceState(index, list(prompt), len(prompt), table, 0, Sampling()))

    def run(self) -> float:
        """Seconds of the whole run."""
        started = time.perf_counter()
        at_once = max(1, TOKEN_BUDGET // PROMPT_TOKENS)
        for first in range(0, len(self.states), at_once):
            self._step(self.states[first : first + at_once])
        for _ in range(self._new - 1):
            self._step(self.states)
        while self._flying:
            self._collect()
        seconds = time.perf_counter() - started
        self._backend.forget(self.states)
        return seconds

    def _step(self, states: Sequence[SequenceState]) -> None:
        if len(self._flying) == DEPTH:
            self._collect()
        counts = [len(state.token_ids) - state.computed_tokens for state in states]
        scheduled = [Scheduled(s, s.computed_tokens, n) for s, n in zip(states, counts, strict=True)]
        self._flying.append(self._backend.launch(scheduled))
        for state in states:
            state.computed_tokens = len(state.token_ids)
            state.token_ids.append(UNKNOWN_TOKEN)

    def _collect(self) -> None:
        for index, sampled in self._flying.popleft().collect().items():
            self.outputs[index].append(sampled.token_id)


def step_seconds(run: Callable[[int, int], float], rounds: int) -> float:
    """Median over rounds of the seconds that one more step takes. `run(new, seed)` gives the seconds of a whole run."""
    run(SHORT, 0)
    found = []
    for seed in range(1, rounds + 1):
        short, long = run(SHORT, 2 * seed), run(LONG, 2 * seed + 1)
        found.append((long - short) / (LONG - SHORT))
    return statistics.median(found)


def in_process(backend: CudaBackend, batches: Sequence[int], vocab_size: int, rounds: int) -> dict[int, float]:
    """Batch -> seconds a step."""
    blocks = max(batches) * -(-(PROMPT_TOKENS + LONG) // BLOCK_SIZE)
    backend.describe(BLOCK_SIZE, TOKEN_BUDGET)
    backend.allocate(BLOCK_SIZE, blocks + 1, 0)

    def run(batch: int, new: int, seed: int) -> float:
        return InProcess(backend, prompts_for(batch, vocab_size, seed), new).run()

    return {batch: step_seconds(partial(run, batch), rounds) for batch in batches}


def through_stack(
    executor_args: Sequence[str], batches: Sequence[int], vocab_size: int, rounds: int
) -> dict[int, float]:
    """Batch -> seconds a step, through client, manager and executor processes."""

    async def generate(target: str, prompts: Prompts, new: int) -> float:
        async with Caller(target) as caller:
            requests = [request_for(prompt, max_tokens=new, ignore_eos=True) for prompt in prompts]
            started = time.perf_counter()
            results = await caller.generate_many(requests)
            seconds = time.perf_counter() - started
        assert all(len(result.tokens) == new for result in results)
        return seconds

    processes.START_TIMEOUT_S = 600.0  # weights of 16 GB and a first compilation
    with processes.running_stack(executor_args, ["--tokenizer", "", "--max-batch-tokens", str(TOKEN_BUDGET)]) as stack:

        def run(batch: int, new: int, seed: int) -> float:
            return asyncio.run(generate(stack.target, prompts_for(batch, vocab_size, 1000 + seed), new))

        return {batch: step_seconds(partial(run, batch), rounds) for batch in batches}


def continuous_batching(directory: Path, batches: Sequence[int], vocab_size: int, rounds: int) -> dict[int, float]:
    """Batch -> seconds a step, by transformers' own continuous batching over its paged cache."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model: Any = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map="cuda").train(False)
    batching = ContinuousBatchingConfig(max_batch_tokens=TOKEN_BUDGET)

    def run(batch: int, new: int, seed: int) -> float:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = time.perf_counter()
        model.generate_batch(
            prompts_for(batch, vocab_size, seed), generation_config=config, continuous_batching_config=batching
        )
        return time.perf_counter() - started

    return {batch: step_seconds(partial(run, batch), rounds) for batch in batches}


def rows_of(
    graphs: dict[int, float], eager: dict[int, float], stack: dict[int, float], peer: dict[int, float]
) -> list[dict[str, Any]]:
    """One row a batch: tokens per second, and what the split costs a step."""
    rows = []
    for batch, seconds in graphs.items():
        split = stack[batch] / seconds - 1 if batch in stack else None
        rows.append(
            {
                "batch": batch,
                "tok_s_graphs": batch / seconds,
                "tok_s_without_graphs": batch / eager[batch] if batch in eager else None,
                "tok_s_both_processes": batch / stack[batch] if batch in stack else None,
                "tok_s_transformers": batch / peer[batch] if batch in peer else None,
                "step_ms": seconds * 1e3,
                "split_costs": split,
                "split_floor_reached": None if split is None else split < SPLIT_FLOOR,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--layers", type=int, default=32, help="fewer, for a smaller card [32]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="where the model is, or is to be written (default: a temporary folder)"
    )
    parser.add_argument("--without", nargs="+", choices=("stack", "transformers"), default=[])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"error: this bench needs a GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    from pagekv.executor.cuda.device import CudaDevice

    config = llama_3_8b(args.layers)
    with tempfile.TemporaryDirectory() as temporary:
        directory: Path = args.model or Path(temporary)
        if not (directory / "config.json").exists():
            print("writing the model", file=sys.stderr)
            directory.mkdir(parents=True, exist_ok=True)
            write_model(directory, config, torch.device("cuda"))
        found: dict[bool, dict[int, float]] = {}
        for graphs in (True, False):
            print(f"in process, {'with' if graphs else 'without'} CUDA graphs", file=sys.stderr)
            backend = CudaBackend(directory, "bench", CudaDevice(), graphs=graphs)
            found[graphs] = in_process(backend, args.batch, config.vocab_size, args.rounds)
            del backend
            gc.collect()
            torch.cuda.empty_cache()
        stack: dict[int, float] = {}
        peer: dict[int, float] = {}
        if "stack" not in args.without:
            print("through both processes", file=sys.stderr)
            flags = ["--backend", "cuda", "--model", str(directory)]
            stack = through_stack(flags, args.batch, config.vocab_size, args.rounds)
        if "transformers" not in args.without:
            print("transformers' continuous batching", file=sys.stderr)
            try:
                peer = continuous_batching(directory, args.batch, config.vocab_size, args.rounds)
            except (RuntimeError, ValueError, ImportError) as error:
                print(f"transformers' continuous batching: {error}", file=sys.stderr)
    rows = rows_of(found[True], found[False], stack, peer)
    if args.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))
        return 0
    for row in rows:
        print()
        for key, value in row.items():
            print(f"{key.replace('_', ' '):28} {value if not isinstance(value, float) else round(value, 4)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
