"""`torch.cuda` without a GPU, as far as the bench and the cuda backend use it, so that their own code for a GPU runs.

    with cuda_stub.installed():
        machine = cuda_stub.machine(say)        # a FirstMachine on CPU tensors; kernels run in the emulation
        device = cuda_stub.device()             # a CudaDevice likewise

Streams run what they are given at once and events take the time. A graph records the operators and kernel launches of
its block, with the very memory they used, and replays them: a step that hands a graph new values anywhere else than
where it read them gets the old results, as on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_first.machine import FirstMachine
from support.kernels.host_build import HostLauncher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagekv.kernels.launch_config import LaunchConfig
from pagekv.kernels.params import Struct
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS, Variant

FAULT = "CUDA error: an illegal memory access was encountered"
_recording: list[Graph] = []


class Stream:
    """Runs everything at once."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...


class Event:
    """The moment of its record."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000


class Graph:
    """The work that its block enqueued."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        """All of it again, on the same memory."""
        for work in self.work:
            work()


class _Operators(TorchDispatchMode):
    """Notes every operator that writes, for a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        aliases = [returned.alias_info for returned in func._schema.returns if returned.alias_info is not None]
        writes = any(alias.is_write for alias in aliases)
        # By memory, not by schema: `reshape` and its like give a view or a copy, as it happens.
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        results = [] if writes else [made for made in _tensors(out) if _memory(made) not in given]
        if not writes and not results:
            return out  # views of memory that is written elsewhere

        def again() -> None:
            new = _tensors(func(*args, **kwargs))
            if results:
                for kept, fresh in zip(_tensors(out), new, strict=True):
                    kept.copy_(fresh)

        self._graph.work.append(again)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _graph(graph: Graph, **_: Any) -> Iterator[None]:
    _recording.append(graph)
    try:
        with _Operators(graph):
            yield
    finally:
        _recording.pop()


class StubLauncher:
    """A `CupyLauncher` whose kernels run in the emulation. After `launches_left` the device is faulty for good."""

    launches_left: float = float("inf")
    arch = "emulated"

    def __init__(self, *_: Any, say: Any = None, text: Callable[[str], str] | None = None) -> None:
        edited = {translation_unit(f): text(f) for f in SOURCES} if text else {}
        self._host = HostLauncher(edit=lambda source: edited.get(source, source))

    def prepare(self, variant: Variant, kernels: Any = ()) -> None:
        """Nothing is compiled ahead."""

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        """Runs the kernel, and notes it where a graph is recorded."""
        StubLauncher.launches_left -= 1
        if StubLauncher.launches_left < 0:
            raise RuntimeError(FAULT)

        kept = params.copy()  # a graph takes parameters by value

        def run() -> None:
            self._host.launch(kernel, variant, config, kept)

        run()
        if _recording:
            _recording[-1].work.append(run)


SOURCES = tuple(kernel.source for kernel in KERNELS.values())


def _empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    return _real_empty(*args, **kwargs)


_real_empty = torch.empty


def _cupy() -> ModuleType:
    made = ModuleType("cupy")
    made.__version__ = "emulated"  # type: ignore[attr-defined]  # as the real one has it
    return made


@contextmanager
def installed() -> Iterator[None]:
    """Within it, `torch.cuda` is the stub and CuPy's launcher the emulation."""
    import pagekv.executor.cuda.device as cuda_device
    import pagekv.kernels.bench.machine as bench_machine

    stream = Stream()
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "emulated GPU",
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (2**28, 2**28),
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 2**20,
        "graph_pool_handle": lambda: (0, 0),
        "set_sync_debug_mode": lambda mode: None,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0,
            cudaHostUnregister=lambda *_: 0,
            cudaProfilerStart=lambda: 0,
            cudaProfilerStop=lambda: 0,
        ),
        "_sleep": lambda cycles: None,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _graph,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "set_stream": lambda stream: None,
        "set_device": lambda device: None,
    }
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub, create=True))
        stack.enter_context(mock.patch.object(torch, "empty", _empty))
        stack.enter_context(mock.patch.dict(sys.modules, {"cupy": _cupy()}))
        stack.enter_context(mock.patch.object(bench_machine, "CupyLauncher", StubLauncher))
        stack.enter_context(mock.patch.object(cuda_device, "CupyLauncher", StubLauncher))
        yield


def machine(say: Callable[[str], None]) -> FirstMachine:
    """The bench's machine on CPU tensors. Emulated kernels are slow: a graph has two rounds."""
    made = FirstMachine(say)
    made.device = torch.device("cpu")
    made.most_rounds = 2
    return made


def device() -> Any:
    """The cuda backend's device on CPU tensors."""
    from pagekv.executor.cuda.device import CudaDevice

    made = CudaDevice()
    made.torch_device = torch.device("cpu")
    return made
