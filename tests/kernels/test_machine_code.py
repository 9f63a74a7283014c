"""Files of machine code: what they are keyed by, and what damage and a read-only home do."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagekv.kernels.machine_code import MachineCode, user_cache
from pagekv.kernels.nvrtc import Compiled


class Compiler:
    """Counts what it is asked to compile."""

    def __init__(self, version: tuple[int, int] = (12, 9)) -> None:
        self.version, self.asked = version, 0

    def compile(self, text: str, name: str, options: list[str]) -> Compiled:
        self.asked += 1
        return Compiled(f"{text} {options}".encode() * 100, "")


def code(folder: Path, compiler: Compiler, arch: int = 90) -> MachineCode:
    return MachineCode(compiler, arch, folder)  # type: ignore[arg-type]  # as much of a compiler as is used


def test_machine_code_is_kept_by_all_that_decides_it(tmp_path: Path) -> None:
    compiler = Compiler()
    file = code(tmp_path, compiler).file("text", "a.cu", ["-a"])
    assert file.read_bytes() == b"text ['--gpu-architecture=sm_90', '-a']" * 100
    assert code(tmp_path, compiler).file("text", "a.cu", ("-a",)) == file
    assert compiler.asked == 1
    others = [
        code(tmp_path, compiler).file("text ", "a.cu", ["-a"]),
        code(tmp_path, compiler).file("text", "a.cu", ["-b"]),
        code(tmp_path, compiler, 80).file("text", "a.cu", ["-a"]),
        code(tmp_path, Compiler((13, 0))).file("text", "a.cu", ["-a"]),
    ]
    assert len({file, *others}) == 5
    assert sorted(tmp_path.iterdir()) == sorted([file, *others]), "and nothing else is left there"


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "unreadable"])
def test_a_damaged_file_is_compiled_again(tmp_path: Path, damage: str) -> None:
    compiler = Compiler()
    file = code(tmp_path, compiler).file("text", "a.cu", [])
    whole = file.read_bytes()
    if damage == "unreadable":  # a link to itself, because root may read whatever has no permissions
        file.unlink()
        file.symlink_to(file.name)
    else:
        file.write_bytes({"truncated": whole[:-1], "changed": b"x" + whole[1:], "empty": b""}[damage])
    assert code(tmp_path, compiler).file("text", "a.cu", []).read_bytes() == whole
    assert compiler.asked == 2
    assert code(tmp_path, compiler).file("text", "a.cu", []).read_bytes() == whole
    assert compiler.asked == 2, "it was mended"


def test_a_home_that_cannot_be_written_to_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiler = Compiler()
    made = code(tmp_path / "file" / "below", compiler)
    files = [made.file(text, "a.cu", []) for text in ("a", "b")]
    assert [file.read_bytes()[:1] for file in files] == [b"a", b"b"]
    del made
    assert not any(file.exists() for file in files), "temporary files are gone with the object"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        code(tmp_path, Compiler()).file("text", "a.cu", [])
    assert list(tmp_path.iterdir()) == []


def test_threads_share_a_folder(tmp_path: Path) -> None:
    made = code(tmp_path, Compiler())
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(lambda i: made.file(str(i % 4), "a.cu", []), range(64)))
    assert len(set(files)) == len(list(tmp_path.iterdir())) == 4


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "pagekv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache() == Path("/home/someone/.cache/pagekv")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    with pytest.raises(OSError, match="Not a directory"):
        user_cache().mkdir(parents=True)
