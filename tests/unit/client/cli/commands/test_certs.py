"""`pagekv certs`: what it writes and says, and what it refuses. Connections with its files are in test_identity.py."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from pagekv.client.cli.main import main, make_parser

FILES = {f"{name}.{end}" for name in ("ca", "manager", "executor", "probe", "client") for end in ("pem", "key")}


def test_files_and_commands_for_a_first_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "with space"
    assert main(["certs", str(directory)]) == 0
    assert {path.name for path in directory.iterdir()} == FILES | {"identities.toml"}
    assert directory.stat().st_mode & 0o777 == 0o700
    out, err = capsys.readouterr()
    up, *commands = [shlex.split(line) for line in out.splitlines() if line.startswith("  pagekv")]
    assert make_parser().parse(up[1:]).certs == directory
    assert [command[0] for command in commands] == ["pagekv-executor", "pagekv-manager", "pagekv"]
    assert commands[1][1:] == [
        *("--tls-cert", f"{directory}/manager.pem", "--tls-key", f"{directory}/manager.key"),
        *("--tls-client-ca", f"{directory}/ca.pem", "--executor-ca", f"{directory}/ca.pem"),
        *("--identities", f"{directory}/identities.toml"),
    ]
    for command in commands:
        assert all(Path(word).is_file() for word in command if "/" in word)
    assert make_parser().parse(commands[2][1:]).client_key == f"{directory}/client.key"
    assert "keep it where no process" in err


def test_the_client_has_every_role(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    assert tomllib.loads((tmp_path / "identities.toml").read_text()) == {
        "certificates": {"client": {"subject": "CN=pagekv-client", "roles": ["generate", "observe", "operate"]}}
    }
    assert (tmp_path / "identities.toml").stat().st_mode & 0o777 == 0o600


def test_again_it_renews_certificates_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    (tmp_path / "identities.toml").write_text("# ours")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(["certs", str(tmp_path), "--days", "2", "--json"]) == 0
    changed = {path.name for path in tmp_path.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == FILES - {"ca.pem", "ca.key"}
    said = json.loads(capsys.readouterr().out)
    assert {Path(path).name for path in said["written"]} == changed
    assert said["ends"]["manager"] < said["ends"]["ca"]


@pytest.mark.parametrize(
    "name",
    ["", "gpu 7", "gpu-7:50051", "https://gpu-7", "300.1.1.1", "-a", "*.example.org", "a..b", "é", "x" * 64, "[::1]"],
)
def test_a_name_that_is_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["certs", str(tmp_path), f"--name={name}"])
    assert end.value.code == 2
    assert "--name: must be a host's name or an IP address, without a port" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["certs", ""])
    assert "argument DIR: must be the path of a directory, is empty" in capsys.readouterr().err


def test_names_and_addresses_are_taken() -> None:
    names = ["gpu-7", "gpu_7.Example.org", "10.0.0.7", "fe80::1", "x" * 63, "7.example.org"]
    args = make_parser().parse(["certs", "x", *(f"--name={name}" for name in names)])
    assert args.names == names


@pytest.mark.parametrize("days", ["0", "3651", "1.5"])
def test_days_out_of_bounds(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["certs", "x", "--days", days])
    assert "--days: must be a whole number from 1 to 3650" in capsys.readouterr().err


def test_an_authority_that_must_not_sign_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    (tmp_path / "ca.key").chmod(0o644)
    before = (tmp_path / "client.pem").read_bytes()
    assert main(["certs", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"chmod 600 {tmp_path}/ca.key")
    assert (tmp_path / "client.pem").read_bytes() == before


def test_without_cryptography_it_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pagekv.client.cli.private_authority", raising=False)
    monkeypatch.delattr("pagekv.client.cli.private_authority", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(["certs", str(tmp_path / "new")]) == 2
    assert "pip install 'pagekv[serve]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
