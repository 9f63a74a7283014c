"""compose.yaml starts processes that take their command lines, and publishes nothing beyond this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clients.stack import environment

from pagekv.executor.config import parse_config as parse_executor
from pagekv.kvmanager.config import parse_config as parse_manager

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
WITH_TLS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.tls.yaml").read_text())["services"]
PARSERS: dict[str, Callable[[list[str], dict[str, str]], Any]] = {
    "pagekv-kvmanager": parse_manager,
    "pagekv-executor": parse_executor,
}
OURS = [name for name, service in SERVICES.items() if service["image"] in PARSERS and name != "certs"]
MANAGERS = [name for name in OURS if name.startswith("kvmanager")]
EXECUTORS = [name for name in OURS if name.startswith("executor")]


def without(command: list[str], flag: str) -> list[str]:
    """The command line without a flag and its value."""
    at = command.index(flag)
    return command[:at] + command[at + 2 :]


def test_there_are_three_pairs_and_one_of_ranks() -> None:
    assert (len(MANAGERS), len(EXECUTORS)) == (4, 4)
    words = SERVICES["executor-tp"]["entrypoint"]
    assert words[0] == "torchrun"
    assert words[-2:] == ["-m", "pagekv.executor"]


@pytest.mark.parametrize("name", MANAGERS)
def test_ports_within_the_private_network_are_accepted_by_command_line(name: str) -> None:
    """Nothing but --insecure in the command line of compose.yaml lets the process listen beyond loopback."""
    command = SERVICES[name]["command"]
    parse_manager(command, {})
    with pytest.raises(SystemExit):
        parse_manager([word for word in command if word != "--insecure"], {})


@pytest.mark.parametrize("name", EXECUTORS)
def test_an_executor_is_its_managers_alone(name: str) -> None:
    command = SERVICES[name]["command"]
    assert parse_executor(command, {}).manager_name == "pagekv-manager"
    with pytest.raises(SystemExit):
        parse_executor(without(command, "--tls-client-ca"), {})


# Managers of the profile "scale" are left out: the gateway speaks no TLS to them.
@pytest.mark.parametrize("name", ["kvmanager", "kvmanager-tp"])
def test_with_the_override_clients_are_known(name: str) -> None:
    assert {each for each in MANAGERS if "scale" not in SERVICES[each].get("profiles", ())} == {*WITH_TLS}
    command, before = WITH_TLS[name]["command"], SERVICES[name]["command"]
    config = parse_manager(command, {})
    assert config.access.protected
    assert not config.open_listeners()
    assert command[command.index("--executor") + 1] == before[before.index("--executor") + 1]
    with pytest.raises(SystemExit):
        parse_manager(without(command, "--identities"), {})


def test_each_container_finds_its_files_and_no_others(tmp_path: Path) -> None:
    """The command of the service that makes them, run twice here: on the second time it renews."""
    ends = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["certs"]["volumes"]}
    (script,) = SERVICES["certs"]["command"]
    tool = tmp_path / "bin" / "pagekv"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m pagekv.client.cli "$@"\n')
    tool.chmod(0o755)
    for path in ends:
        (tmp_path / path[1:]).mkdir(parents=True)
    command = [*SERVICES["certs"]["entrypoint"], script.replace("/certificates", f"{tmp_path}/certificates")]
    env = environment() | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    made: list[bytes] = []
    for _ in range(2):
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=240)
        made.append((tmp_path / "certificates/manager/manager.pem").read_bytes())
        with (tmp_path / "certificates/manager/identities.toml").open("a") as file:
            file.write("# kept\n")
    assert made[0] != made[1]
    assert (tmp_path / "certificates/manager/identities.toml").read_text().count("# kept") == 2
    by_volume = {volume: tmp_path / path[1:] for path, volume in ends.items()}
    assert (by_volume.pop("authority") / "ca.key").exists()
    services = [(name, SERVICES[name]) for name in OURS]
    for name, service in [*services, *((name, SERVICES[name] | changed) for name, changed in WITH_TLS.items())]:
        (volume,) = (mount.split(":")[0] for mount in service["volumes"] if mount.endswith(":/tls:ro"))
        wanted = set(re.findall(r"/tls/([\w.]+)", str([service["command"], service["healthcheck"]["test"]])))
        there = {path.name for path in by_volume[volume].iterdir()}
        assert wanted <= there, name
        own = "manager.key" if name in MANAGERS else "executor.key"
        assert {path for path in there if path.endswith(".key")} == {own, "probe.key"}
        for path in by_volume[volume].iterdir():
            assert path.stat().st_mode & 0o777 == 0o600


def test_ports_are_published_to_loopback_alone() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) > 4
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    # A container in the host's own network would listen at all of the host's addresses.
    assert [name for name, service in SERVICES.items() if "network_mode" in service] == []
