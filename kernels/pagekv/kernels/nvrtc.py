"""NVRTC, the CUDA compiler as a library, by ctypes: device code from text, with no GPU, driver, CuPy or headers.

Sources of the library: the wheels nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc (CUDA 13), which may both be
installed, torch's CUDA builds, or a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLKIT = Path("/usr/local/cuda/lib64")


class NvrtcMissing(RuntimeError):
    """No NVRTC on this machine; the message says what to install."""


class CompileError(RuntimeError):
    """The compiler refused the text; the message is its log."""


@dataclass(frozen=True)
class Compiled:
    """Result of one compilation."""

    code: bytes
    """A cubin for a real architecture (sm_90), PTX for a virtual one (compute_90)."""
    log: str
    """Warnings and, with --ptxas-options=-v, registers, spills and memory of each kernel."""


def libraries(cuda: int) -> Iterator[str]:
    """Candidates for the NVRTC of a CUDA major version: paths in wheels, the name for the system's loader, a toolkit's
    path.
    """
    name = f"libnvrtc.so.{cuda}"
    folder = "nvidia/cuda_nvrtc/lib" if cuda == 12 else f"nvidia/cu{cuda}/lib"
    yield from (str(path) for entry in sys.path if (path := Path(entry, folder, name)).is_file())
    yield name
    yield str(TOOLKIT / name)


def load(cuda: int) -> tuple[str, ctypes.CDLL]:
    """Path and library of the NVRTC of a CUDA major version, 12 or above. Raises NvrtcMissing."""
    for path in libraries(cuda):
        try:
            # Loaded beforehand, because the library in wheels of CUDA 13 does not look for these beside itself.
            for builtins in Path(path).parent.glob(f"libnvrtc-builtins.so.{cuda}.*") if "/" in path else ():
                ctypes.CDLL(str(builtins))
            return path, ctypes.CDLL(path)
        except OSError:
            continue
    wheel = "nvidia-cuda-nvrtc-cu12" if cuda == 12 else f"'nvidia-cuda-nvrtc=={cuda}.*'"
    raise NvrtcMissing(f"no NVRTC of CUDA {cuda} is installed: pip install {wheel}")


class Nvrtc:
    """The loaded library. Threads may compile at the same time."""

    def __init__(self, cuda: int) -> None:
        """`cuda`: the CUDA major version, 12 or above. Raises NvrtcMissing."""
        self.path, self._library = load(cuda)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor version of the compiler, such as (12, 4)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def architectures(self) -> list[int]:
        """Compute capabilities this compiler knows, such as 90."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(archs))
        return list(archs)

    def compile(self, text: str, name: str, options: Sequence[str]) -> Compiled:
        """Compiles one translation unit. `name`: of the text, in messages. Raises CompileError with the log."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        )
        try:
            encoded = [option.encode() for option in options]
            status = self._library.nvrtcCompileProgram(
                program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
            )
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise CompileError(f"{name} ({' '.join(options)}): {self._message(status)}\n{log.strip()}")
            to_cubin = any(option.startswith("--gpu-architecture=sm_") for option in options)
            return Compiled(self._read(program, "CUBIN" if to_cubin else "PTX"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        """nvrtcGet<what>, by way of nvrtcGet<what>Size."""
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _message(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"{self.path}: {self._message(status)}")
