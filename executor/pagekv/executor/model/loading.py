"""Loads a model directory and probes its attention with a forward pass of two tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pagekv.common.logs import Log
from pagekv.common.phases import Phase, phase
from pagekv.executor.machine import memory_for
from pagekv.executor.model.attention_interface import ATTENTION_NAME, Scores, UnsupportedAttention, forward
from pagekv.executor.model.shards import Shards
from pagekv.executor.model.tensor_parallel import split_plan, take_shards
from pagekv.executor.model.torch_import import import_meta_kernels
from pagekv.executor.model.transformers_import import without_compiler
from pagekv.executor.model.unsupported import refuse_unsupported

log = Log(__name__)

# Rotary embeddings whose frequencies depend on the longest sequence of a batch if that exceeds the original context.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
# The type of layers that have the configured window; also that of layers whose types are not configured.
_WITH_WINDOW = "sliding_attention"


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """The shape of a model's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, with its sizes and limits."""

    model: PreTrainedModel
    geometry: BlockGeometry
    num_heads: int
    # KV heads of the whole model; a rank of a split model has some of them.
    model_kv_heads: int
    # One for each layer.
    scores: tuple[Scores, ...]
    # Columns of the logits. Each is a token that the model has an embedding for.
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    # [num_layers, 2, num_kv_heads] float32: factors of keys and values that are stored in fp8; None: all are 1.
    kv_scales: torch.Tensor | None = None


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu", shards: Shards | None = None
) -> LoadedModel:
    """Loads a causal language model in Hugging Face format: config.json and safetensors. Weights are mapped and not
    copied where device and element type allow. `shards`: loads this rank's share of a split model; all ranks call it.

    Raises ValueError, naming the model and what to do, when the model cannot be served exactly; OSError when files are
    missing.
    """
    transformers_logging.disable_progress_bar()
    with phase("loading the weights") as loading, _progress_of(loading):
        return _load(directory, dtype, device, shards)


@contextmanager
def _progress_of(loading: Phase) -> Iterator[None]:
    """Reports to the phase how many weights transformers has loaded. Releases before 5.5 have no hook for that."""
    set_hook = getattr(transformers_logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def counted(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = args[0] if args else kwargs.get("iterable")
        if not isinstance(found, Sized) or not isinstance(found, Iterable):
            return factory(*args, **kwargs)

        def each() -> Iterator[Any]:
            for done, one in enumerate(found):
                loading.progress(done, len(found))
                yield one

        return each()

    before = set_hook(counted)
    try:
        yield
    finally:
        set_hook(before)


def memory_to_load(directory: Path) -> AbstractContextManager[None]:
    """Raises TooLittleMemory if loading the model, or repacking its weights, runs out of memory."""
    return memory_for(f"{directory}: loading it", "use a smaller model, or a machine with more memory")


def _load(directory: Path, dtype: torch.dtype, device: torch.device | str, shards: Shards | None) -> LoadedModel:
    config = _read_config(directory)
    refuse_unsupported(directory, config)
    text = config.get_text_config()
    # Before the weights are read, which may take minutes.
    window = _configured_window(directory, text)
    # RuntimeError: of a GPU that fails or a rank that is lost.
    raw = () if shards is None and torch.device(device).type == "cpu" else (RuntimeError,)
    # `without_compiler`: the functions that initialise weights load torch's compiler when they are first called.
    # `memory_to_load`: the kernel may refuse to map a file that is larger than the machine's memory.
    placed = nullcontext() if shards is None else _kept_on(torch.device(device))
    with _explained(directory, "load the model", *raw), without_compiler(), memory_to_load(directory), placed:
        try:
            found = _create(directory, config, dtype, shards)
        except NotImplementedError:
            # Creating the model may take an operator without a meta kernel in C++.
            if not import_meta_kernels():
                raise
            found = None
        # The second time only once the error, which holds the first model, is gone.
        model, report = found or _create(directory, config, dtype, shards)
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise ValueError(
            f"{directory}: the weights lack {len(absent)} tensors of the configuration, such as {absent[0]}; "
            "use a complete copy of the model"
        )
    if shards is not None:
        _take_shards(directory, model, shards)
    model.train(False).requires_grad_(False).to(device)
    # Without a padding token: some models search every batch for it, to warn of it, and the host then waits for the
    # device. Bypasses the checks of the configuration, because some model types want a number.
    object.__setattr__(model.config, "pad_token_id", None)
    with _explained(directory, "compute the model", *raw), memory_to_load(directory):
        calls, vocab_size = _probe(directory, model, text)
    if vocab_size > (num_embeddings := model.get_input_embeddings().num_embeddings):
        raise ValueError(
            f"{directory}: {type(model).__name__} cannot be served: it has logits of {vocab_size} tokens and "
            f"embeddings of {num_embeddings}; use another model"
        )
    return LoadedModel(
        model=model,
        geometry=BlockGeometry(len(calls), calls[0].num_kv_heads, calls[0].head_size, dtype),
        num_heads=calls[0].num_heads,
        model_kv_heads=calls[0].num_kv_heads if shards is None else _num_kv_heads(text),
        scores=tuple(call.scores for call in calls),
        vocab_size=vocab_size,
        max_model_len=_max_model_len(directory, text, window, [call.scores.window for call in calls]),
        eos_token_ids=_eos_token_ids(directory, model, text, vocab_size),
    )


def _create(directory: Path, config: Any, dtype: torch.dtype, shards: Shards | None) -> tuple[PreTrainedModel, Any]:
    """The model with its weights, and transformers' report on them."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        # The default multiplies experts in grouped products, which torch does not have for float64.
        **({"experts_implementation": "eager"} if dtype is torch.float64 else {}),
        **(_split(directory, config, shards) if shards is not None else {}),
    )
    return model, report


@contextmanager
def _kept_on(device: torch.device) -> Iterator[None]:
    """Keeps the share of a rank on CPUs in host memory, since transformers puts it on a GPU if torch finds one. Hiding
    the GPUs would have no effect any more, because the driver has already been asked for their number.
    """
    if device.type != "cpu":
        yield
        return
    found = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_, **__: device
    try:
        yield
    finally:
        torch._C._get_accelerator = found


def _split(directory: Path, config: Any, shards: Shards) -> dict[str, Any]:
    """The arguments with which transformers splits the model. Raises ValueError for a family without a tensor-parallel
    plan.
    """
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"{directory}: transformers has no tensor-parallel plan for models of type {config.model_type!r}: serve it "
            "with one rank, or another model"
        )
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = split_plan(_num_kv_heads(text), shards.size, text.base_model_tp_plan)
    return {"distributed_config": DistributedConfig(tp_size=shards.size, tp_plan=plan or "auto")}


def _take_shards(directory: Path, model: PreTrainedModel, shards: Shards) -> None:
    text = model.config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    try:
        take_shards(model, shards, _num_kv_heads(text), size)
    except ValueError as error:
        raise ValueError(f"{directory}: {type(model).__name__} cannot be split: {error}; use another model") from error


def _num_kv_heads(text: Any) -> int:
    found: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return found


@contextmanager
def _explained(directory: Path, work: str, *raw: type[Exception]) -> Iterator[None]:
    """Turns errors of transformers into a ValueError of one line. Passes on ValueErrors, which are meant for users
    already, errors of memory and files, and errors of the types `raw`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (ValueError, OSError, MemoryError, *raw)):
            raise
        said = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(
            f"{directory}: transformers {transformers.__version__} cannot {work}: {type(error).__name__}: {said}; use "
            "a complete copy of the model, or another model"
        ) from error


def _read_config(directory: Path) -> Any:
    """Raises ValueError for a model type that transformers has no code for, and for fields that it cannot use."""
    with _explained(directory, "read config.json"):
        written, _ = PreTrainedConfig.get_config_dict(directory, local_files_only=True)
        kind = written.get("model_type")
        if kind is not None and kind not in CONFIG_MAPPING:
            code = ", and code that comes with a checkpoint is not run" if "auto_map" in written else ""
            raise ValueError(
                f"{directory}: transformers {transformers.__version__} knows no models of type {kind!r}{code}; use "
                "another model"
            )
        # Without `trust_remote_code=False`, transformers asks at the terminal whether to run such code.
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


class _LayerCall(NamedTuple):
    """The shapes and scores of one layer's call of attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scores: Scores


class _Probe:
    """A `StepAttention` that records the calls by layer and computes nothing."""

    def __init__(self) -> None:
        self.calls: dict[int, _LayerCall] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        if key.shape != value.shape or query.shape[2] != key.shape[2] or query.shape[0] % key.shape[0]:
            raise UnsupportedAttention("the model's queries, keys and values differ in head size")
        if layer in self.calls:
            raise UnsupportedAttention(f"layer {layer} of the model calls attention twice")
        self.calls[layer] = _LayerCall(query.shape[0], key.shape[0], key.shape[2], scores)
        return torch.zeros_like(query.transpose(0, 1))


@torch.inference_mode()
def _probe(directory: Path, model: PreTrainedModel, text: Any) -> tuple[list[_LayerCall], int]:
    """The layers' calls in one forward pass of two tokens, and the columns of the logits. Refuses the model unless
    every layer calls attention once, all with the same shape.
    """
    probe, name = _Probe(), f"{directory}: {type(model).__name__}"
    try:
        with torch.device(model.device):
            ids, positions, rows = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], torch.tensor([1])
        logits = forward(model, ids, positions, rows, probe)
    except UnsupportedAttention as error:
        raise ValueError(f"{name} cannot be served: {error}; use another model") from error
    calls = [call for _, call in sorted(probe.calls.items())]
    if not calls or sorted(probe.calls) != list(range(text.num_hidden_layers)):
        raise ValueError(
            f"{name} cannot be served: {len(calls)} of its {text.num_hidden_layers} layers use "
            "transformers' attention interface; use a model of which every layer does"
        )
    if len({(call.num_kv_heads, call.head_size) for call in calls}) != 1:
        raise ValueError(f"{name} cannot be served: its layers differ in KV heads or head size; use another model")
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind != "sliding_attention" and calls[layer].scores.window is not None:
            raise ValueError(f"{name} cannot be served: layer {layer} is {kind} but has a window; use another model")
    return calls, logits.shape[-1]


def _configured_window(directory: Path, text: Any) -> int | None:
    """The window of the layers that have one, as transformers' cache reads it from the configuration. Raises ValueError
    for a window that is no number of tokens: transformers does not check the field in families that do not declare it.
    """
    field = "sliding_window" if getattr(text, "sliding_window", None) else "attention_chunk_size"
    window = getattr(text, field, None) or None
    kinds = getattr(text, "layer_types", None) or [_WITH_WINDOW]
    if window is not None and _WITH_WINDOW in kinds and (type(window) is not int or window < 1):
        raise ValueError(f"{directory}: {field} in config.json must be a number of tokens, got {window!r}; correct it")
    return window


def _max_model_len(directory: Path, text: Any, window: int | None, windows: Sequence[int | None]) -> int:
    """The longest context that the model can serve exactly, in tokens. `window`: the configured one; `windows`: of the
    layers' attention calls.
    """
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise ValueError(f"{directory}: config.json has no max_position_embeddings; add it")
    rope = getattr(text, "rope_parameters", None) or {}
    # In some models a dictionary of dictionaries: one for each layer type.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in BATCH_DEPENDENT_ROPE:
            # The frequencies are fixed up to this length. Beyond it, one sequence's length would change another's
            # output.
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None) or longest
            longest = min(longest, int(original))
    kinds = getattr(text, "layer_types", None) or [_WITH_WINDOW] * len(windows)
    untold = any(kind == _WITH_WINDOW and told is None for kind, told in zip(kinds, windows, strict=True))
    # Some layers have a window in transformers' mask or cache, but do not pass it to attention. Contexts up to that
    # window are not affected by it.
    if window is not None and untold and window < longest:
        longest = window
        log.warning(
            "the context is limited to the window of layers that do not pass it to attention",
            model_type=text.model_type,
            max_model_len=longest,
        )
    return longest


def _eos_token_ids(directory: Path, model: PreTrainedModel, text: Any, vocab_size: int) -> tuple[int, ...]:
    generation = model.generation_config
    found = generation.eos_token_id if generation is not None else None
    if found is None:
        found = text.eos_token_id
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"{directory}: eos_token_id must be a token id, or a list of them, got {found!r}; correct it")
    return tuple(sorted({token_id for token_id in ids if 0 <= token_id < vocab_size}))
