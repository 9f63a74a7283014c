"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagekv.client.cli.atomic_file import replace_file


def test_a_file_is_made_and_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content, mode in ((b"one", 0o600), (b"two", 0o644)):
        replace_file(path, content, mode)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, mode)
    assert os.listdir(tmp_path) == ["f"]


def test_a_reader_keeps_the_file_that_it_has_opened(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    with path.open("rb") as reader:
        replace_file(path, b"behind", 0o600)
        assert reader.read() == b"before"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/f")
    replace_file(link, b"x", 0o600)
    assert link.is_symlink()
    assert (tmp_path / "there" / "f").read_bytes() == b"x"


def test_a_failure_leaves_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no room")

    path = tmp_path / "f"
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no room"):
        replace_file(path, b"behind", 0o600)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a file away takes root")
def test_the_owner_stays(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    os.chown(path, 10001, 10002)
    replace_file(path, b"behind", 0o600)
    assert (path.stat().st_uid, path.stat().st_gid) == (10001, 10002)
