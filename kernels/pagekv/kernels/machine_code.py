"""Machine code of kernels for one GPU architecture, in files: compiled by NVRTC, kept in the user's cache folder.

CuPy could compile, too, but only one kernel at a time, and only with CUDA headers, which these kernels do not need.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from pagekv.kernels.nvrtc import Nvrtc


def user_cache() -> Path:
    """$XDG_CACHE_HOME/pagekv, by default ~/.cache/pagekv; for a user without a home, a folder that cannot be made."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagekv"
    except RuntimeError:
        return Path(os.devnull) / "pagekv"


class MachineCode:
    """Files of machine code, each named by a digest of all inputs of its compilation and by a digest of its content.

    So a truncated or damaged file is never used: the kernel is compiled again. Threads and processes may share a
    folder.
    """

    def __init__(self, compiler: Nvrtc, arch: int, folder: Path | None = None) -> None:
        """`arch`: compute capability to compile for, such as 90. `folder`: default $XDG_CACHE_HOME/pagekv/kernels."""
        self._compiler, self.arch = compiler, arch
        self._folder = folder or user_cache() / "kernels"
        self._version = ".".join(map(str, compiler.version))
        self._lock = threading.Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def file(self, text: str, name: str, options: Sequence[str], architecture: str = "") -> Path:
        """A file with the machine code of a text, which is compiled unless its code is kept. `name`: the text's name in
        messages. `architecture`: default that of `arch`, such as sm_90.

        If the folder cannot be written to, the file lasts as long as this object. Raises CompileError, and OSError if
        there is no place for the file at all.
        """
        options = [f"--gpu-architecture={architecture or f'sm_{self.arch}'}", *options]
        key = _digest("\0".join([self._version, *options, text]).encode())
        if kept := _kept(self._folder, key):
            return kept
        code = self._compiler.compile(text, name, options).code
        try:
            return _keep(self._folder, key, code)
        except OSError:  # a read-only home only costs time
            with self._lock:
                self._temporary = self._temporary or tempfile.TemporaryDirectory(prefix="pagekv-kernels-")
            return _keep(Path(self._temporary.name), key, code)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _kept(folder: Path, key: str) -> Path | None:
    try:
        for path in folder.glob(f"{key}-*.cubin"):
            if path.name == f"{key}-{_digest(path.read_bytes())}.cubin":
                return path
    except OSError:
        pass
    return None


def _keep(folder: Path, key: str, code: bytes) -> Path:
    """Writes the file atomically. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}-{_digest(code)}.cubin"
    descriptor, partial = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
    return path
