"""The file in which a process says where it listens."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from pagekv.common.port_file import add_to_port_file, bound_address, read_port_file, tell_cannot_start, write_port_file


@pytest.mark.parametrize(
    ("listen", "port", "address"),
    [
        ("127.0.0.1:0", 7, "127.0.0.1:7"),
        ("[::1]:50051", 50051, "[::1]:50051"),
        ("unix:/run/pagekv:0", 1, "unix:/run/pagekv:0"),
    ],
)
def test_the_bound_port_takes_the_place_of_the_one_asked_for(listen: str, port: int, address: str) -> None:
    assert bound_address(listen, port) == address


def test_a_reader_gets_all_of_it_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "port"
    assert read_port_file(path) == {}
    listening = {"listen": "127.0.0.1:1", "recordings": ["/tmp/a b"]}
    write_port_file(path, listening)
    assert read_port_file(path) == listening
    assert path.read_text().count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["port"]
    nowhere = tmp_path / "none" / "port"
    with pytest.raises(OSError, match=rf"^--port-file {nowhere}: cannot be written: No such file or directory$"):
        write_port_file(nowhere, listening)


def test_nothing_is_left_of_a_line_for_which_the_disk_has_no_room(tmp_path: Path) -> None:
    """A limit of the size of files stands in for the disk."""
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(OSError, match=rf"^--port-file {tmp_path}/port: cannot be written: File too large$"):
            write_port_file(tmp_path / "port", {"listen": "127.0.0.1:1"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    assert not list(tmp_path.iterdir())


def test_facts_are_added_changed_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "port"
    write_port_file(path, {"listen": "127.0.0.1:1"})
    add_to_port_file(str(path), cannot_start="no luck")
    add_to_port_file(str(path), phase={"name": "a"})
    assert read_port_file(path) == {"cannot_start": "no luck", "phase": {"name": "a"}, "listen": "127.0.0.1:1"}
    add_to_port_file(str(path), phase=None)
    assert read_port_file(path) == {"cannot_start": "no luck", "listen": "127.0.0.1:1"}


def test_facts_make_no_file_and_stop_nobody(tmp_path: Path) -> None:
    add_to_port_file("", phase="a")
    add_to_port_file(str(tmp_path / "port"), phase="a")
    add_to_port_file(str(tmp_path / "none" / "port"), phase="a")
    assert not [*tmp_path.iterdir()]


def test_a_process_that_never_listened_says_why_and_nothing_of_one_before(tmp_path: Path) -> None:
    path = tmp_path / "port"
    for _ in range(2):
        tell_cannot_start(str(path), "no luck")
        assert read_port_file(path) == {"cannot_start": "no luck"}
        write_port_file(path, {"listen": "127.0.0.1:1"})
    tell_cannot_start("", "no luck")
    tell_cannot_start(str(tmp_path / "none" / "port"), "no luck")
    assert [entry.name for entry in tmp_path.iterdir()] == ["port"]


def test_every_key_is_told_to_users() -> None:
    keys = {"listen", "http", "kv_events", "recordings", "phase", "cannot_start"}
    docs = Path(__file__).parents[3] / "docs"
    rows = [line.split("|")[1] for line in (docs / "deployment.md").read_text().splitlines() if line.startswith("| `")]
    assert keys <= set(re.findall(r"`(\w+)`", " ".join(rows)))
    flags = [line for line in (docs / "flags.md").read_text().splitlines() if line.startswith("| `--port-file")]
    assert len(flags) == 2
    assert all({"phase", "cannot_start"} <= set(re.findall(r"`(\w+)`", line)) for line in flags)
