"""The configuration file: where it is, what it may have, and how it is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pagekv.client.cli.config_file import config_path, read_config
from pagekv.client.cli.parser import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert config_path({"XDG_CONFIG_HOME": "/etc/mine"}) == Path("/etc/mine/pagekv/config.toml")
    for folder in ("", "relative"):
        assert config_path({"XDG_CONFIG_HOME": folder}) == Path("/home/me/.config/pagekv/config.toml")


def test_none_is_no_mistake(path: Path) -> None:
    assert read_config(path) == {}
    path.write_text("")
    assert read_config(path) == {}
    assert read_config(path / "below a file") == {}


def test_a_byte_order_mark_is_passed_over(path: Path) -> None:
    assert read_config(write(path, '\ufefftarget = "a:1"')) == {"target": "a:1"}


def test_paths_begin_where_the_file_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = 'target = "a:1"\napi_key = "k"\nca = "ca.pem"\nclient_cert = "~/c.pem"\nclient_key = "/c.key"\n'
    assert read_config(write(path, text)) == {
        "target": "a:1",
        "api_key": "k",
        "ca": str(path.parent / "ca.pem"),
        "client_cert": "/home/me/c.pem",
        "client_key": "/c.key",
    }


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_a_key_that_others_may_open_is_refused(path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=f"chmod 600 {path}$") as caught:
        read_config(write(path, 'api_key = "secret"', mode))
    assert "secret" not in str(caught.value)
    assert read_config(write(path, 'target = "a:1"', mode)) == {"target": "a:1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('api-key = "secret"', "no key 'api-key'; did you mean api_key?"),
        ('frobnicate = "secret"', "no key 'frobnicate'; known are target, api_key"),
        ("[client]\n", "no key 'client'; did you mean"),
        ("api_key = 5", "api_key: must be text, is a int"),
        ('ca = ""', "ca: must be text, is empty"),
        ('target = "a"\napi_key = secret', r"is not TOML: .*line 2"),
    ],
)
def test_what_is_refused(path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_config(write(path, text))
    assert str(caught.value).startswith(f"{path}: ")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read(path: Path) -> None:
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_config(path)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_config(path.parent)


def test_a_folder_of_somebody_else_is_no_mistake(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user whom `sudo -u` left HOME=/root. Tests may run as root, to whom no folder is closed."""

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    assert read_config(path) == {}
    monkeypatch.undo()
    write(path, "")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        read_config(path)
