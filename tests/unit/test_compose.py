"""compose.yaml starts processes that take their command lines, and publishes nothing beyond this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagekv.executor.config import parse_config as parse_executor
from pagekv.kvmanager.config import parse_config as parse_manager

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
PARSERS: dict[str, Callable[[list[str], dict[str, str]], object]] = {
    "pagekv-kvmanager": parse_manager,
    "pagekv-executor": parse_executor,
}
OURS = [name for name, service in SERVICES.items() if service["image"] in PARSERS]


def test_there_are_three_pairs() -> None:
    assert len(OURS) == 6


@pytest.mark.parametrize("name", OURS)
def test_ports_within_the_private_network_are_accepted_by_command_line(name: str) -> None:
    """Nothing but --insecure in the command line of compose.yaml lets the process listen beyond loopback."""
    parse, command = PARSERS[SERVICES[name]["image"]], SERVICES[name]["command"]
    parse(command, {})
    with pytest.raises(SystemExit):
        parse([word for word in command if word != "--insecure"], {})


def test_ports_are_published_to_loopback_alone() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) > 4
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    # A container in the host's own network would listen at all of the host's addresses.
    assert [name for name, service in SERVICES.items() if "network_mode" in service] == []
