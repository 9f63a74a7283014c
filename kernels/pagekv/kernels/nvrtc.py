"""NVRTC, the CUDA compiler as a library, by ctypes: device code from text, with no GPU, driver or CuPy.

The library comes with the wheels nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc (CUDA 13), with torch's CUDA
builds, or with a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

IN_SITE_PACKAGES = ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib")
SUFFIXES = (".so.12", ".so.13")


class NvrtcMissing(RuntimeError):
    """No NVRTC on this machine; the message says what to install."""


class CompileError(RuntimeError):
    """The compiler refused the text; the message is its log."""


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave."""

    code: bytes
    """A cubin for a real architecture (sm_90), PTX for a virtual one (compute_90)."""
    log: str
    """Warnings and, with --ptxas-options=-v, registers, spills and memory of each kernel."""


def find_library() -> str:
    """Path or name of the NVRTC library. Raises NvrtcMissing where there is none."""
    for entry in sys.path:
        for folder in IN_SITE_PACKAGES:
            for suffix in SUFFIXES:
                library = Path(entry, folder, f"libnvrtc{suffix}")
                if library.is_file():
                    return str(library)
    for candidate in (ctypes.util.find_library("nvrtc"), "/usr/local/cuda/lib64/libnvrtc.so"):
        if candidate and ("/" not in candidate or Path(candidate).is_file()):
            return candidate
    raise NvrtcMissing("no NVRTC found: install it with pip install nvidia-cuda-nvrtc-cu12 (part of pagekv[dev])")


class Nvrtc:
    """The loaded library. One program is compiled at a time."""

    def __init__(self, library: str | None = None) -> None:
        self.path = library or find_library()
        self._library = ctypes.CDLL(self.path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> tuple[int, int]:
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
        """Compiles one translation unit. `name` is what messages call it. Raises CompileError with the log."""
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
