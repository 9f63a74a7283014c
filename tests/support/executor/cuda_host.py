"""`CudaBackend` without a GPU: a device of CPU tensors whose kernels are the real sources, run by the emulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.executor.cpu_driver import MODELS, Driver
from support.kernels.host_build import HostLauncher
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Launch, Scheduled, SequenceState
from pagekv.executor.cuda.backend import CudaBackend
from pagekv.executor.cuda.device import CudaDevice
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.swap import CopyStream, Streams
from pagekv.kernels.variants import Variant


class NeverWaits(TorchDispatchMode):
    """Refuses operators for which the host would wait for a GPU: those whose value or shape it has to know."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    WAITING: tuple[str, ...] = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        assert name not in [waiting.lstrip("_") for waiting in self.WAITING], f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} with a mask waits for the device"
        return func(*args, **(kwargs or {}))


class Recordable(NeverWaits):
    """Refuses also what a recording cannot have: tensors made of the host's values."""

    WAITING: tuple[str, ...] = (*NeverWaits.WAITING, "lift_fresh")


class HostStreams(Streams):
    """Every copy is done when it returns."""

    def __init__(self) -> None:
        """There is no GPU."""

    def mark(self, stream: CopyStream) -> None:
        """Nothing to wait for."""

    def wait(self, stream: CopyStream, event: None) -> None:
        """Nothing to wait for."""

    def done(self, event: None) -> bool:
        return True

    def copy(self, stream: CopyStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)


class LateStreams(Streams):
    """A copy is done when another stream waits for it, as late as a GPU may do it."""

    def __init__(self) -> None:
        """There is no GPU."""
        self._left: dict[CopyStream, list[Callable[[], object]]] = {stream: [] for stream in CopyStream}

    def mark(self, stream: CopyStream) -> list[Callable[[], object]]:
        return self._left[stream]

    def wait(self, stream: CopyStream, event: list[Callable[[], object]]) -> None:
        while event:
            event.pop(0)()

    def done(self, event: list[Callable[[], object]]) -> bool:
        return not event

    def copy(self, stream: CopyStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._left[stream].append(lambda: destination.copy_(source))


@dataclass
class HostDevice(CudaDevice):
    """A device without streams. Recording a graph notes the function; replaying runs it, with what it had bound when it
    was recorded. It must be `Recordable` when it is first replayed, since recording emulates nothing: many graphs are
    recorded that no test replays. `refuses_capture`: no function can be recorded; `tries_capture`: one that is not
    `Recordable` cannot, which is slow to find out.
    """

    launcher: Launcher = field(default_factory=HostLauncher)
    versions: dict[str, str] = field(default_factory=lambda: {"gpu": "emulated"})
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    streams: Streams = field(default_factory=HostStreams)
    pinned_bytes: int = 0
    refuses_capture: bool = False
    tries_capture: bool = False
    memory: int = 2**28
    prepared: tuple[Variant, bool] | None = None
    """The variant that was compiled before serving, and whether prompts by warpgroups were."""
    compute_capability: tuple[int, int] = (9, 0)

    def prepare(self, variant: Variant, *, wgmma_prefill: bool = False) -> None:
        self.prepared = variant, wgmma_prefill

    def capability(self) -> tuple[int, int]:
        return self.compute_capability

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pin(self, tensor: torch.Tensor) -> None:
        self.pinned_bytes += tensor.nbytes

    def unpin(self, tensor: torch.Tensor) -> None:
        self.pinned_bytes -= tensor.nbytes

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def synchronize(self) -> None:
        pass

    def available_bytes(self) -> int:
        return self.memory

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 2**20

    def bandwidth(self) -> tuple[int, int]:
        return 10**9, 2 * 10**9

    def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self.refuses_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.tries_capture:
            try:
                with Recordable():
                    function()
                    # The run that is recorded.
                    function()
            except AssertionError as error:
                raise RuntimeError(f"called a synchronizing CUDA operation: {error}") from error
        replayed = False

        def replay() -> torch.Tensor:
            nonlocal replayed
            if replayed:
                return function()
            replayed = True
            with Recordable():
                return function()

        return replay


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with a head size that kernels serve, and two layers: emulation is slow."""
    if config.model_type == "gpt2":
        config.n_embd, config.n_head, config.n_layer = 128, 2, 2
        return config
    config.head_dim = 64
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config


def save_small_model(name: str, directory: Path, seed: int = 1, **fields: Any) -> Any:
    """As `cpu_driver.save_model`, with heads of 64 elements; `fields` override the configuration."""
    torch.manual_seed(seed)
    config = _small(MODELS[name]())
    for field_name, value in fields.items():
        setattr(config, field_name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms start at one value, which would hide a mistake with them
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model


def host_backend(directory: Path, device: HostDevice | None = None, **options: Any) -> CudaBackend:
    """A backend over a saved model."""
    return CudaBackend(directory, str(directory.name), device or HostDevice(), **options)


class PipelinedDriver(Driver):
    """Launches every step before the one before it is collected, as the executor does."""

    def __init__(self, backend: CudaBackend, block_size: int = 4, num_blocks: int = 400) -> None:
        super().__init__(backend, block_size, num_blocks)
        self.cuda = backend
        self.under_way: deque[tuple[Launch, list[tuple[SequenceState, int]]]] = deque()

    def step(self, counts: dict[int, int], states: list[SequenceState]) -> None:
        self.launch(counts, states)
        if len(self.under_way) > 1:
            self.collect()

    def launch(self, counts: dict[int, int], states: list[SequenceState]) -> None:
        """One step, launched."""
        scheduled = []
        for state in states:
            count = min(counts[state.seq_id], len(state.token_ids) - state.computed_tokens)
            while len(state.block_table) * self.block_size < state.computed_tokens + count:
                state.block_table.append(self.free.pop())
            if count:
                scheduled.append(Scheduled(state, state.computed_tokens, count))
        launch = self.cuda.launch(scheduled)
        sampling = []
        for item in scheduled:
            item.state.computed_tokens += item.count
            if item.state.computed_tokens == len(item.state.token_ids):
                sampling.append((item.state, len(item.state.token_ids)))
                item.state.token_ids.append(UNKNOWN_TOKEN)
        self.under_way.append((launch, sampling))

    def collect(self) -> None:
        """The oldest step's tokens."""
        launch, sampling = self.under_way.popleft()
        sampled = launch.collect()
        assert set(sampled) == {state.seq_id for state, _ in sampling}
        for state, index in sampling:
            state.token_ids[index] = sampled[state.seq_id].token_id

    def generate(self, states: list[SequenceState], new: int, chunk: int = 10**6) -> list[list[int]]:
        outputs = super().generate(states, new, chunk)
        while self.under_way:
            self.collect()
        return [self.output(state)[: len(output)] for state, output in zip(states, outputs, strict=True)]
