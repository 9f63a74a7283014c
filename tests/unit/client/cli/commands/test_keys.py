"""`pagekv keys`: a key for a shell's variable, its hash for the manager."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from pagekv.client.cli.main import main
from pagekv.kvmanager.access.identities_file import read_identities
from pagekv.kvmanager.access.identity import Role


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identities.toml"


def test_standard_output_has_the_key_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "alice", "--role", "operate", "--role", "generate", "--file", str(path)]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"pkv_[\w-]{43}\n", out)
    key = out.strip()
    assert key not in err
    assert "alice (generate, operate). It is not shown again" in err
    assert key not in path.read_text()
    assert tomllib.loads(path.read_text())["keys"]["alice"]["sha256"] == hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize("line", ["--json keys add a", "keys --json add a", "keys add a --json"])
def test_for_scripts_it_is_an_object(line: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), "--role", "observe", "--file", str(path)]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (said["name"], said["roles"], said["key"][:4], err) == ("a", ["observe"], "pkv_", "")


def test_no_two_keys_are_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        assert main(["keys", "add", name, "--role", "observe", "--file", str(path)]) == 0
    assert len({*capsys.readouterr().out.split()}) == 2


def test_a_name_that_is_taken(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add = ["keys", "add", "alice", "--role", "observe", "--file", str(path)]
    assert main(add) == 0
    capsys.readouterr()
    assert main(add) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"pagekv: {path}: has a caller 'alice' already: remove its section first, or choose another name\n"


def test_callers_are_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("")
    assert main(["keys", "list", "--file", str(path)]) == 0
    assert capsys.readouterr().out == "no callers\n"
    assert main(["keys", "add", "alice", "--role", "observe", "--tenant", "red", "--file", str(path)]) == 0
    path.write_text(path.read_text() + '\n[certificates.p]\nsubject = "CN=p"\nroles = ["observe"]\n')
    capsys.readouterr()
    assert main(["keys", "list", "--file", str(path)]) == 0
    assert capsys.readouterr().out == (
        "name   kind         tenant  roles\nalice  key          red     observe\np      certificate  p       observe\n"
    )
    assert main(["keys", "list", "--file", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "identities": [
            {"name": "alice", "kind": "key", "roles": ["observe"], "tenant": "red"},
            {"name": "p", "kind": "certificate", "roles": ["observe"], "tenant": "p"},
        ]
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "required: add|list"),
        ("ad", "invalid choice: 'ad'"),
        ("add", "pagekv keys add: the following arguments are required"),
        ("add alice --file f", "required: --role"),
        ("add alice --role generate", "required: --file"),
        ("add alice --role admin --file f", "--role: invalid choice: 'admin'"),
        (
            "add a.b --role generate --file f",
            "NAME: must be 1 to 64 letters, digits, _ and -, with no - first, got 'a.b'",
        ),
        ("list", "required: --file"),
        ("list --file f --fil g", "did you mean --file?"),
    ],
)
def test_wrong_usage(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["keys", *line.split()])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_wrong_usage_is_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "list", "--json"])
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "USAGE"


def test_tenants_of_a_key(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manager takes what is written."""
    add = ["keys", "add", "--role", "generate", "--file", str(path)]
    assert main([*add, "alice", "--tenant", "research"]) == 0
    assert main([*add, "gateway", "--act-for", "research", "--act-for", "sales"]) == 0
    assert main([*add, "any", "--act-for", "*"]) == 0
    found = {each.name: each for each in read_identities(path).keys.values()}
    assert found["alice"].tenant == "research"
    assert found["gateway"].tenant == "gateway"
    assert found["gateway"].act_for == {"research", "sales"}
    assert found["gateway"].roles == {Role.GENERATE, Role.ACT_FOR}
    assert found["any"].act_for == {"*"}
    with pytest.raises(SystemExit):
        main([*add, "bad", "--tenant", "not a name"])
    assert "must be 1 to 64 letters" in capsys.readouterr().err
