"""Files of TOML: what is read, and the one line of every file that is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagekv.kvmanager.access.toml_file import MAX_FILE_BYTES, TomlFileError, read_toml


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "file.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_tables_are_read(tmp_path: Path) -> None:
    assert read_toml(written(tmp_path, "[a.b]\nc = 1")) == {"a": {"b": {"c": 1}}}
    assert read_toml(written(tmp_path, "")) == {}
    # Editors on Windows begin a file with a byte order mark.
    assert read_toml(written(tmp_path, "\ufeffa = 1")) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xff", "must be UTF-8, byte 0 is not"),
        ("a = ", "must be TOML: "),
        ("a = " + "[" * 100_000, "must be TOML with fewer nested levels"),
        # Refused by Python with an error that is not one of TOML.
        ("a = " + "9" * 5000, "must be TOML: Exceeds the limit"),
        ("#" * (MAX_FILE_BYTES + 1), f"must have at most {MAX_FILE_BYTES} bytes"),
    ],
)
@pytest.mark.parametrize("secret", [False, True])
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str | bytes, words: str, secret: bool) -> None:
    with pytest.raises(TomlFileError, match=f"^{words}") as caught:
        read_toml(written(tmp_path, text), secret=secret)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o610, 0o602, 0o601])
def test_a_secret_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, "", mode)
    with pytest.raises(TomlFileError, match=f"^must be writable only by its owner.* has {mode:03o}$"):
        read_toml(path, secret=True)
    assert read_toml(path) == {}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400])
def test_a_secret_that_is_closed_is_read(tmp_path: Path, mode: int) -> None:
    assert read_toml(written(tmp_path, "a = 1", mode), secret=True) == {"a": 1}


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(TomlFileError, match=r"^must be a regular file$"):
            read_toml(wrong)
    with pytest.raises(TomlFileError, match=r"^cannot be read: No such file or directory$"):
        read_toml(tmp_path / "none")
