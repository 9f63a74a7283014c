"""Chooses how steps are computed, by trying in this order:

1. with `fused`, the compiled loops: the whole model if its family is known, else attention and linear layers within
   transformers' model; they need a working Numba;
2. transformers' model with repacked linear layers;
3. transformers' model as it is.

Ways 1 and 2 are used only if the logits of a few tokens agree with those of way 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from pagekv.common.logs import Log
from pagekv.common.phases import phase
from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.forward import ModuleForward, StepForward
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.routing import Routing
from pagekv.executor.cpu.runner import plan_step
from pagekv.executor.machine import TooLittleMemory, memory_for
from pagekv.executor.model.decoder import read_decoder
from pagekv.executor.model.loading import LoadedModel, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.model.tensor_parallel import keeps_heads

log = Log(__name__)

# The steps of the check, as numbers of tokens of two sequences: a prompt whose keys fill more than one panel; a token
# after it, beside another prompt; two decodes; and the decodes that follow, which replay the recorded step.
CHECKED_STEPS, BLOCK_SIZE = ((70, 0), (1, 9), (1, 1), (1, 1)), 4
# Each way rounds differently. The bound is the norm of the difference of all logits, relative to their norm. Small
# random models in bfloat16 differ by 0.02.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def load_forward(
    model_path: Path, dtype: torch.dtype, *, fused: bool, shards: Shards | None = None
) -> tuple[LoadedModel, StepForward]:
    """Loads the model and chooses how its steps are computed. `fused`: by compiled loops, as far as possible.
    `shards`: the ranks of a split model, which all have to choose the same way. Raises as `load_model`.
    """
    loaded = load_model(model_path, dtype, shards=shards)
    for way in (LOOPS, PACKED_LAYERS) if fused else (PACKED_LAYERS,):
        if dtype not in TOLERANCE:
            reason = f"{way.name} compute only in float32 and bfloat16, not in {dtype}"
        elif not (reason := way.why_not(loaded, shards)):
            found = _checked(loaded, dtype, shards, way)
            if not isinstance(found, str):
                within = " within transformers' model" if isinstance(found, ModuleForward) else ""
                log.info(f"steps are computed by {way.name}{within}", model_type=loaded.model.config.model_type)
                return loaded, found
            reason = found
            # The failed way has taken the weights out of the model.
            del loaded
            loaded = load_model(model_path, dtype, shards=shards)
        log.info(f"steps are not computed by {way.name}", reason=reason)
    return loaded, ModuleForward(loaded.model, pack=False)


def _checked(loaded: LoadedModel, dtype: torch.dtype, shards: Shards | None, way: _Way) -> StepForward | str:
    """The steps' forward pass computed in this way, which takes the model's weights; or the reason why this rank or
    another one cannot use it. Raises TooLittleMemory when repacked layers find no memory.
    """
    failed, reason = False, ""
    routing = Routing(loaded.model)
    with phase("computing logits with transformers, to compare with"), routing.kept():
        expected = _logits(ModuleForward(loaded.model, pack=False), loaded, routing)
    try:
        with way.made(loaded, shards) as forward, routing.repeated():
            agree = _agree(_logits(forward, loaded, routing), expected, TOLERANCE[dtype]) and routing.agrees
        reason = "" if agree else f"{way.name} compute other logits than transformers: please report this model"
    except TooLittleMemory:
        raise
    # Numba that does not fit NumPy or the processor, or a model unlike the rest of its family, can raise anything.
    except Exception as error:
        # LLVM repeats its message over many lines.
        first_line = str(error).partition("\n")[0]
        failed, reason = True, f"{way.name} failed: {type(error).__name__}: {first_line}"
    if shards is not None:
        reason = shards.why_not_all(reason, way.remedy, failed=failed)
    return reason or forward


@contextmanager
def _by_loops(loaded: LoadedModel, shards: Shards | None) -> Iterator[StepForward]:
    """The compiled loops, which Numba compiles when they are first called."""
    with phase("importing Numba"):
        from pagekv.executor.cpu.native.code_cache import note_compiled, when_compiled
    model = f"{loaded.geometry.dtype} {shards and shards.size} {loaded.model.config.to_json_string()}"
    when = when_compiled(model)
    with phase("compiling the loops of a step" + (f", {when}" if when else "")):
        yield _loops(loaded, shards)
    note_compiled(model)


@contextmanager
def _by_packed_layers(loaded: LoadedModel, _: Shards | None) -> Iterator[StepForward]:
    work = "repacking the weights of linear layers"
    with phase(work), memory_for(work, "use a smaller model, or a machine with more memory"):
        yield ModuleForward(loaded.model)


def _why_no_loops(loaded: LoadedModel, shards: Shards | None) -> str:
    reason, kind = "", loaded.model.config.model_type
    if find_spec("numba") is None:
        reason = "numba is not installed"
    elif shards is not None and read_decoder(loaded.model) is None:
        reason = f"compiled loops do not know models of type {kind}"
    elif shards is not None and not keeps_heads(loaded.model):
        reason = f"ranks of models of type {kind} gather the heads of a layer"
    return reason if shards is None else shards.why_not_all(reason, LOOPS.remedy, failed=False)


class _Way(NamedTuple):
    """A way to compute steps. `why_not`: the reason why this rank or another one cannot use it for a model; empty if
    all ranks may try it. `remedy`: advice for a group of ranks in which one rank alone fails with this way.
    """

    name: str
    why_not: Callable[[LoadedModel, Shards | None], str]
    made: Callable[[LoadedModel, Shards | None], AbstractContextManager[StepForward]]
    remedy: str


LOOPS = _Way("the compiled loops", _why_no_loops, _by_loops, "start with --no-fused")
PACKED_LAYERS = _Way("repacked linear layers", lambda *_: "", _by_packed_layers, "please report this model")


def _loops(loaded: LoadedModel, shards: Shards | None) -> StepForward:
    decoder = read_decoder(loaded.model, experts=shards is None)
    if decoder is None:
        return ModuleForward(loaded.model, loops=True)
    from pagekv.executor.cpu.fused_decoder import FusedDecoder

    heads = (loaded.num_heads, loaded.geometry.num_kv_heads)
    if shards is None:
        return FusedDecoder(decoder, loaded.scores, *heads)
    from pagekv.executor.cpu.sharded_decoder import ShardedDecoder

    return ShardedDecoder(decoder, loaded.scores, *heads, shards, loaded.vocab_size)


@torch.inference_mode()
def _logits(forward: StepForward, loaded: LoadedModel, routing: Routing | None = None) -> torch.Tensor:
    """The logits `[R, num_logits]` that CHECKED_STEPS sample, one step after the other. Prompts are shortened to the
    model's context.
    """
    totals = [sum(counts) for counts in zip(*CHECKED_STEPS, strict=True)]
    width = -(-max(totals) // BLOCK_SIZE)
    cache = KvCache(loaded.geometry, BLOCK_SIZE, len(totals) * width)
    states = [
        SequenceState(index, [], 0, list(range(index * width, (index + 1) * width)), 0, Sampling())
        for index in range(len(totals))
    ]
    plan, found = None, []
    for step, counts in enumerate(CHECKED_STEPS, 1):
        items = []
        # Leaves room for one token of each later step.
        longest = loaded.max_model_len - (len(CHECKED_STEPS) - step)
        for state, count in zip(states, counts, strict=True):
            start = len(state.token_ids)
            end = min(start + count, longest)
            if end <= start:
                continue
            state.token_ids += [(7 * state.seq_id + place) % loaded.vocab_size for place in range(start, end)]
            items.append(Scheduled(state, start, end - start))
        if items:
            plan = plan_step(cache, items, plan)
            if routing is not None:
                routing.sampled = [row for row, _ in plan.sampling]
            found.append(forward.logits(plan, cache).clone())
    return torch.cat(found).float()


def _agree(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm())
