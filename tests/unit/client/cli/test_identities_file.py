"""The identities file: keys are added to what is there, and never stand in it themselves."""

from __future__ import annotations

import hashlib
import os
import tomllib
from pathlib import Path

import pytest

from pagekv.client.cli.identities_file import ROLES, SECTIONS, add_certificate, add_key, is_name, list_identities
from pagekv.client.errors import PageKVError
from pagekv.kvmanager.access.identities_file import read_identities
from pagekv.kvmanager.access.toml_file import TomlFileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identities.toml"


def test_a_file_is_made_for_its_owner_alone(path: Path) -> None:
    add_key(path, "alice", "secret", ["generate", "operate"])
    digest = hashlib.sha256(b"secret").hexdigest()
    assert tomllib.loads(path.read_text()) == {"keys": {"alice": {"sha256": digest, "roles": ["generate", "operate"]}}}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("end", ["", "\n", "\n\n# the end"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_what_is_there_stays(path: Path, end: str, mark: str) -> None:
    before = f'# ours\n[keys."old one"]\nsha256 = "00"\nroles = []\n[certificates.x]\nsubject = "CN=x"{end}'
    path.write_text(mark + before)
    path.chmod(0o640)
    add_key(path, "alice", "secret", ["observe"])
    assert path.read_text().startswith(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in list_identities(path)] == ["old one", "alice", "x"]


def test_a_name_is_of_one_caller(path: Path) -> None:
    add_certificate(path, "prometheus", "CN=prometheus", ["observe"])
    add_key(path, "alice", "secret", ["observe"])
    text = path.read_text()
    for name in ("alice", "prometheus"):
        with pytest.raises(PageKVError, match=f"has a caller '{name}' already"):
            add_key(path, name, "other", ["observe"])
    assert path.read_text() == text


def test_the_gateway_is_listed_and_its_name_taken(path: Path) -> None:
    path.write_text('[gateway]\nroles = ["generate"]\n')
    assert [tuple(each) for each in list_identities(path)] == [("gateway", "gateway", ("generate",), "gateway")]
    with pytest.raises(PageKVError, match="has a caller 'gateway' already"):
        add_key(path, "gateway", "secret", ["generate"])
    path.write_text("[gateway]\nroles = 5\n")
    with pytest.raises(PageKVError, match=r"identities\.toml: gateway: must be a table with roles, a list of names"):
        list_identities(path)


def test_callers_are_listed_with_their_roles_and_tenants(path: Path) -> None:
    add_certificate(path, "prometheus", "CN=prometheus", ["observe"])
    add_key(path, "alice", "secret", ROLES, "research")
    assert [tuple(each) for each in list_identities(path)] == [
        ("alice", "key", ("generate", "observe", "operate"), "research"),
        ("prometheus", "certificate", ("observe",), "prometheus"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 1\nb b = 2", "is not TOML: .*line 2"),
        ("a = " + "[" * 10_000, "is not TOML: "),
        ("a = " + "7" * 10_000, "is not TOML: "),
        (
            '[clients.a]\nroles = ["observe"]',
            r"'clients' is no section of this file: a caller is a table \[keys\.NAME\]",
        ),
        ("keys = 3", "keys: must be a table, is a int"),
        ("[keys]\na = 3", r"keys\.a: must be a table with roles"),
        ('[certificates.a]\nroles = "observe"', r"certificates\.a: must be a table with roles"),
        ("keys = {}", r"takes no section \[keys\.alice\] at its end"),
    ],
)
def test_a_file_of_another_kind_is_left_alone(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(PageKVError, match=words):
        add_key(path, "alice", "secret", ["observe"])
    assert path.read_text() == text


def test_the_manager_knows_the_same_sections(path: Path) -> None:
    """Read from the manager's words about a section that it does not know."""
    path.write_text("[zzzz.alice]")
    path.chmod(0o600)
    with pytest.raises(TomlFileError, match="zzzz: is not known; there are ") as caught:
        read_identities(path)
    names = str(caught.value).partition("there are ")[2].split(", ")
    assert sorted(names) == sorted(SECTIONS)


def test_what_cannot_be_read_or_written(path: Path) -> None:
    with pytest.raises(PageKVError, match="cannot be read: No such file"):
        list_identities(path)
    with pytest.raises(PageKVError, match="cannot be written: No such file"):
        add_key(path.parent / "missing" / "f", "alice", "secret", ["observe"])
    with pytest.raises(PageKVError, match="cannot be written: File name too long"):
        add_key(path.parent / ("x" * 300), "alice", "secret", ["observe"])
    os.mkfifo(pipe := path.with_name("pipe"))
    for other in (path.parent, pipe):
        # Nobody writes into the pipe, so it would be read for ever.
        with pytest.raises(PageKVError, match="must be a regular file"):
            add_key(other, "alice", "secret", ["observe"])
    path.write_bytes(b"\xff")
    with pytest.raises(PageKVError, match="is not UTF-8 text"):
        list_identities(path)


def test_names_stand_bare_in_toml() -> None:
    assert all(map(is_name, ("a", "team-7_x", "7", "x" * 64)))
    assert not any(map(is_name, ("", "-a", "a b", "a.b", "é", "a\n", "x" * 65)))
