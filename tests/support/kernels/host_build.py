"""Kernels compiled for the CPU with g++ and run by `host_cuda.h`: the launcher of tests without a GPU.

    launcher = HostLauncher()                   # or HostLauncher(reversed_order=True)
    launcher.launch("pagekv_decode", variant, config, params)

The launcher is a `launch_config.Launcher` whose addresses are those of NumPy arrays or CPU tensors; `launch` returns
when the kernel has ended. `HostKernelError` names the kernel's mistake: a barrier not reached by all threads, a wrong
address, undefined arithmetic, a loop that does not end. `edit` changes the kernel's text first, to prove that a fault
is noticed (`planted_faults.py`).

With PAGEKV_HOST_SANITIZE=1, in a process that has libasan preloaded (`sanitizer_environment`), kernels are compiled
with AddressSanitizer: accesses outside of any array are errors too, and so are those to what
`launcher.forbidden(array)` names.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pagekv.kernels.launch_config import LaunchConfig
from pagekv.kernels.params import Struct
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS, Variant

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("PAGEKV_HOST_KERNELS", HERE.parents[2] / "build" / "host-kernels"))
SANITIZE = os.environ.get("PAGEKV_HOST_SANITIZE") == "1"

# Headers of every kernel, and what is compiled once and linked to every kernel; the library depends on them.
HEADERS = ("host_cuda.h", "host_run.h", "host_builtins.h", "host_sm90a.h", "host_fibers.h")
RUNTIME = ("host_launch.cc", "host_operations.cc")
# Lines of the kernel's text for messages: a sixth of a compilation, and so for a kernel that has failed alone.
LINES = "-g1"
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"),
    "-ffp-contract=off",  # one rounding per operation, as the twins assume; kernels that want a fused one say fmaf
    *("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-ftrivial-auto-var-init=pattern"),
]
RUNTIME_FLAGS = ["-O2", LINES]  # every launch runs it
SANITIZER_FLAGS = [
    *("-fsanitize=address", "-fsanitize-recover=address", "-fno-omit-frame-pointer", LINES),
    "-Og",  # few launches each: a decode kernel takes 0.8 CPU s to compile and not 1.4
    *("--param", "asan-instrumentation-with-call-threshold=1000000"),  # in line: their reports are host_launch.cc's
]

Edit = Callable[[str], str]


class HostKernelError(RuntimeError):
    """A kernel did something that a GPU does not allow; the message says what and where."""


class HostBuildError(RuntimeError):
    """g++ is missing or does not compile a kernel; the message is the compiler's."""


class _Launch(ctypes.Structure):
    """`host_run::Launch`."""

    _fields_ = [
        ("params", ctypes.c_void_p),
        ("stacks", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("reversed", ctypes.c_uint32),
        ("seconds", ctypes.c_uint32),
    ]


class HostLauncher:
    """Runs kernels on the CPU, one thread block after the other."""

    # A library has one shared memory and one set of fibers, and all have the same stacks.
    _lock = threading.Lock()
    _stacks: ClassVar[int | None] = None

    def __init__(
        self, *, reversed_order: bool = False, edit: Edit | None = None, seconds: int = 60, blocks: int = 3
    ) -> None:
        """`reversed_order`: blocks, warps and threads run last to first. `seconds`: of CPU time, of a launch. `blocks`:
        those that a launch of dealt work has at most, as if no more ran at a time."""
        self.reversed_order = reversed_order
        self.edit = edit
        self.seconds = seconds
        self.blocks = blocks
        self.copied_bytes = 0
        """Bytes that asynchronous copies of all launches have read from memory."""

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        """Runs a kernel to its end. Raises HostKernelError, and HostBuildError where it does not compile."""
        source = translation_unit(KERNELS[kernel].source)
        text = self.edit(source) if self.edit else source
        macros = tuple(f"-D{name}={value}" for name, value in KERNELS[kernel].macros_of(variant).items())
        x, y, z = config.grid
        grid = (min(x, self.blocks) if config.dealt else x, y, z)
        self.run_text(kernel, text, macros, grid, config.threads, config.shared_bytes, params)

    def run_text(
        self,
        kernel: str,
        text: str,
        macros: Sequence[str],
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: Struct,
    ) -> None:
        """`launch` with a kernel of the caller's, from one text."""
        library = load(text, kernel, tuple(macros))
        launch = _Launch(
            params=params.ctypes.data,
            params_bytes=params.nbytes,
            shared_bytes=shared_bytes,
            grid=grid,
            threads=threads,
            reversed=self.reversed_order,
            seconds=self.seconds,
        )
        with self._lock:
            if HostLauncher._stacks is None:
                HostLauncher._stacks = library.pagekv_host_stacks()
            launch.stacks = HostLauncher._stacks
            before = library.pagekv_host_copied()
            error = library.pagekv_host_launch(ctypes.byref(launch))
            self.copied_bytes += library.pagekv_host_copied() - before
        if error:
            words = error.decode(errors="replace")
            # Nobody reads by what words a planted fault is noticed.
            raise HostKernelError(f"{kernel}: {words if self.edit else _with_line(words, text, kernel, tuple(macros))}")

    @contextmanager
    def forbidden(self, *arrays: npt.NDArray[Any]) -> Iterator[None]:
        """Contiguous arrays that no kernel may touch meanwhile; noticed by AddressSanitizer alone.

        In units of 8 bytes: where an array begins or ends within a unit, that part stays accessible.
        """
        if not SANITIZE:
            yield
            return
        runtime = ctypes.CDLL(None)
        with ExitStack() as stack:
            for array in arrays:
                if not array.flags.c_contiguous:
                    raise ValueError("arrays: must be contiguous")
                begin = -(-array.ctypes.data // 8) * 8
                size = max(0, (array.ctypes.data + array.nbytes) // 8 * 8 - begin)
                address, length = ctypes.c_void_p(begin), ctypes.c_size_t(size)
                # By name as text: two underscores begin a private name in a class.
                getattr(runtime, "__asan_poison_memory_region")(address, length)
                stack.callback(getattr(runtime, "__asan_unpoison_memory_region"), address, length)
            yield


def _with_line(error: str, text: str, kernel: str, macros: tuple[str, ...]) -> str:
    """Adds the line of the kernel's text where an error names an offset in the library."""
    offset = re.search(r"at offset (0x[0-9a-f]+)|\.so\+(0x[0-9a-f]+)", error)
    if offset and (tool := shutil.which("addr2line")):
        # The same code at the same places.
        library = build(text, kernel, macros if SANITIZE else (*macros, LINES))
        command = [tool, "-Cipfse", library, offset[1] or offset[2]]
        return f"{error}\n{subprocess.run(command, capture_output=True, text=True).stdout.strip()}"
    return error


@cache
def compiler() -> tuple[str, str]:
    """Path and version of g++."""
    path = shutil.which("g++")
    if path is None:
        raise HostBuildError("g++ is missing: tests run the kernels with it (Debian, Ubuntu: apt-get install g++)")
    version = subprocess.run([path, "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, check=True)
    return path, version.stdout.replace("\n", " ")


@cache
def load(text: str, kernel: str, macros: tuple[str, ...] = ()) -> ctypes.CDLL:
    """A kernel's library, compiled unless one of the same text and flags is in the cache.

    Raises HostBuildError where it does not compile.
    """
    library = ctypes.CDLL(str(build(text, kernel, macros)))
    library.pagekv_host_launch.restype = ctypes.c_char_p
    library.pagekv_host_launch.argtypes = [ctypes.c_void_p]
    library.pagekv_host_stacks.restype = ctypes.c_void_p
    library.pagekv_host_copied.restype = ctypes.c_uint64
    return library


def build(text: str, kernel: str, macros: tuple[str, ...] = ()) -> Path:
    """The file behind `load`."""
    flags, key = common()
    whole = f'#include "host_kernel.h"\n{text}\n#line 1 "end of {kernel}"\nPAGEKV_HOST_KERNEL({kernel})\n'
    library = CACHE / f"{kernel}-{digest(key, *macros, whole)}.so"

    def make(made: Path) -> None:
        source = made.with_name(f"{kernel}.cc")
        source.write_text(whole, encoding="utf-8")
        compile_to(made, [*flags, *macros, "-shared", f"-I{precompiled()}", source, *runtime()], kernel)

    make_once(library, make)
    return library


@cache
def common() -> tuple[list[str], str]:
    """Flags of every kernel, and a text of all that they and the headers decide."""
    flags = [*FLAGS, *(SANITIZER_FLAGS if SANITIZE else ()), f"-I{HERE}"]
    texts = [(HERE / name).read_text(encoding="utf-8") for name in (*HEADERS, *RUNTIME)]
    return flags, "\0".join([compiler()[1], *flags, *RUNTIME_FLAGS, *texts])


@cache
def precompiled() -> Path:
    """The folder of `host_kernel.h`, all headers compiled once: they would be a third of a small kernel's time."""
    flags, key = common()
    folder = CACHE / f"headers-{digest(key)}"
    folder.mkdir(parents=True, exist_ok=True)
    header = folder / "host_kernel.h"
    make_once(header, lambda made: made.write_text('#include "host_cuda.h"\n', encoding="utf-8"))
    # -w: functions that no kernel uses here.
    command: list[str | Path] = [*flags, "-w", "-x", "c++-header", header]
    make_once(header.with_suffix(".h.gch"), lambda made: compile_to(made, command, header.name))
    return folder


@cache
def runtime() -> list[Path]:
    """The objects of `RUNTIME`, compiled once: they would be most of a small kernel's time."""
    flags, key = common()
    objects = [CACHE / f"{Path(name).stem}-{digest(key)}.o" for name in RUNTIME]
    for name, path in zip(RUNTIME, objects, strict=True):
        command: list[str | Path] = [*flags, *RUNTIME_FLAGS, "-c", HERE / name]
        make_once(path, partial(compile_to, arguments=command, what=name))
    return objects


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def make_once(path: Path, make: Callable[[Path], object]) -> None:
    """Unless `path` exists: makes a file in a folder of its own, moved to `path` at once, so that no test beside this
    one sees half. Others wait meanwhile: ranks need the same kernels, and would compile each at the same time.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            make(made)
            made.replace(path)


def compile_to(made: Path, arguments: Sequence[str | Path], what: str) -> None:
    """Raises HostBuildError with the compiler's words."""
    # Not with the sanitizer preloaded, which would watch the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [compiler()[0], *arguments, "-o", made]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise HostBuildError(f"{what} does not compile with g++:\n{result.stderr}")


def sanitizer_environment() -> dict[str, str]:
    """The environment of a process whose launchers use AddressSanitizer."""
    path, _ = compiler()
    runtime = subprocess.run([path, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(runtime.stdout.strip())
    if not library.is_absolute():
        raise HostBuildError("libasan is missing: it comes with g++ (Debian, Ubuntu: libgcc-dev depends on it)")
    options = {
        "detect_leaks": 0,  # Python's
        "halt_on_error": 0,  # an error ends the launch and not the process
        "suppress_equal_pcs": 0,  # the same place may fail again in the next example
        "allocator_may_return_null": 1,
        "symbolize": 0,
    }
    return {
        **os.environ,
        "PAGEKV_HOST_SANITIZE": "1",
        "LD_PRELOAD": str(library.resolve()),
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in options.items()),
        "PYTHONMALLOC": "malloc",
    }


def address(array: npt.NDArray[Any] | None) -> int:
    """Address of an array, for a structure's pointer; 0 for none."""
    return 0 if array is None else int(array.ctypes.data)


# Bytes on both sides of an array that nothing else uses, so that a kernel with a planted fault, which writes beside its
# arrays, fails its check and does not bring the test process down. None under AddressSanitizer, which has to see that.
GUARD_BYTES = 0 if SANITIZE else 1 << 20


def aligned_empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike, alignment: int = 256) -> npt.NDArray[Any]:
    """An array that begins at a multiple of `alignment`, as GPU allocations do, filled with 0xff bytes."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + alignment + 2 * GUARD_BYTES, np.uint8)
    start = GUARD_BYTES + -(raw.ctypes.data + GUARD_BYTES) % alignment
    array = raw[start : start + size]
    array[:] = 0xFF
    return array.view(dtype).reshape(shape)
