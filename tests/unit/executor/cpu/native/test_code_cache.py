"""Machine code kept between processes: where it is, and that loops run wherever it cannot be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import carray, cfunc, types
from numba.core.registry import cpu_target

from pagekv.executor.cpu.native import code_cache
from pagekv.executor.cpu.native.code_cache import code_folder, compile_kept, note_compiled, when_compiled


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(code_cache, "_not_kept", [])
    code_folder.cache_clear()
    yield tmp_path
    code_folder.cache_clear()


def adding(number: int) -> Callable[[Any], None]:
    def work(raw: Any) -> None:
        carray(raw, 1, np.int64)[0] += number

    return work


def hits(number: int) -> int:
    """How often the code was found; it adds the number."""

    def compile(work: Any, *, cache: bool) -> Any:
        return cfunc(types.void(types.voidptr), cache=cache)(work)

    compiled, total = compile_kept(compile, adding(number)), np.array([1])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(total.ctypes.data)
    assert total[0] == 1 + number
    return int(compiled.cache_hits)


def files(caches: Path) -> list[Path]:
    return [path for path in caches.rglob("*") if path.is_file()]


def test_each_model_is_compiled_once(caches: Path) -> None:
    once = f"once: they are cached in {code_folder()}"
    assert when_compiled("a") == when_compiled("b") == once
    note_compiled("a")
    assert (when_compiled("a"), when_compiled("b")) == ("", once)


def test_each_kind_of_processor_compiles_once(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with different processors share a home."""
    note_compiled("a")
    assert [hits(1), hits(1)] == [0, 1]
    codegen = type(cpu_target.target_context.codegen())
    monkeypatch.setattr(codegen, "magic_tuple", lambda self: ("another", "processor"))
    assert when_compiled("a") == f"once: they are cached in {code_folder()}"
    assert hits(1) == 0
    note_compiled("a")
    assert when_compiled("a") == ""


def test_code_that_could_not_be_kept_is_compiled_again(caches: Path) -> None:
    """As after a crash, or on a disk that fills up: the next start says again that it compiles, and why."""
    note_compiled("a")
    hits(1)
    for path in files(caches):
        if path.suffix == ".nbi":
            path.write_bytes(b"")
    assert hits(1) == 0
    note_compiled("a")
    assert when_compiled("a") == f"once: they are cached in {code_folder()}"
    assert hits(1) == 0
    note_compiled("a")
    assert when_compiled("a") == ""


def test_code_is_kept_and_found_again(caches: Path) -> None:
    assert [hits(number) for number in (1, 2, 1, 2)] == [0, 0, 1, 1]
    assert not numba.config.CACHE_DIR
    folder = code_folder()
    assert isinstance(folder, Path)
    assert folder.parent == caches / "pagekv"
    assert folder.stat().st_mode & 0o777 == 0o700
    # An index and the code in a folder of each: what else is written at once cannot take its number.
    assert sorted(len(files(own)) for own in folder.iterdir()) == [2, 2]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_files_cut_short_are_thrown_away(caches: Path, kind: str, left: int) -> None:
    hits(1)
    for path in files(caches):
        if path.suffix == f".{kind}":
            path.write_bytes(path.read_bytes()[:left])
    assert hits(1) == 0
    assert files(caches) == []
    assert [hits(1), hits(1)] == [0, 1]


def test_a_folder_of_the_users_choice(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(caches / "chosen"))
    hits(1)
    assert {path.relative_to(caches).parts[:2] for path in files(caches)} == {("chosen", "pagekv")}


def no_home(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)


def a_file_in_its_place(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (caches / "pagekv").touch()


def of_another_user(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = caches.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: uid + 1)


def open_to_others(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (caches / "pagekv").mkdir()
    (caches / "pagekv").chmod(0o777)


def read_only(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)


def no_room(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(dir: Path) -> Iterator[Any]:
        with open("/dev/full", "wb") as file:
            yield file

    monkeypatch.setattr("tempfile.TemporaryFile", full)


@pytest.mark.parametrize("why", [no_home, a_file_in_its_place, of_another_user, open_to_others, read_only, no_room])
def test_loops_run_where_code_cannot_be_kept(
    why: Callable[[Path, pytest.MonkeyPatch], None],
    caches: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    why(caches, monkeypatch)
    assert [hits(1), hits(1)] == [0, 0]
    assert [path.name for path in files(caches)] in ([], ["pagekv"])
    assert [record.message for record in caplog.records] == [
        "compiled loops are not cached: each start compiles them again"
    ]
    assert when_compiled("a model") == f"at every start, because they cannot be cached: {code_folder()}"
