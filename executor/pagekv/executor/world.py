"""The place of this process in its group of ranks, read from torchrun's environment variables. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The most ranks, as for `pagekv plan --tp`.
MAX_RANKS = 1024
# Seconds that the other ranks get to finish a call, or to agree, once one rank has failed. If all ranks meet the same
# error, or agree on it, they need no such time; a rank that waits in a collective would wait until its timeout.
OTHERS_S = 3.0
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class World:
    """A rank of a group of `size` ranks, of which `local_size` are on this machine. `address` and `port`: of the
    group's store. `has_store`: the process that started the ranks runs the store, otherwise rank 0 does. `local_rank`:
    the rank's number on this machine, if known. `anew`: that process has started its ranks before.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    address: str = ""
    port: int = 0
    has_store: bool = False
    local_rank: int | None = None
    anew: bool = False


ALONE = World()


def read_world(env: Mapping[str, str]) -> World:
    """The world that these environment variables describe; ALONE without WORLD_SIZE. Raises ValueError, naming a
    variable that is missing or wrong.
    """
    if not env.get("WORLD_SIZE"):
        return ALONE
    size = _number(env, "WORLD_SIZE", 1, MAX_RANKS)
    if size == 1:
        return ALONE
    if not env.get("MASTER_ADDR"):
        raise ValueError(
            f"MASTER_ADDR: must name the machine of the ranks' store, as WORLD_SIZE is {size}; it is unset"
        )
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1, size) if env.get("LOCAL_WORLD_SIZE") else size
    return World(
        rank=_number(env, "RANK", 0, size - 1),
        size=size,
        local_size=local_size,
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT", 1, _LAST_PORT),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        local_rank=_number(env, "LOCAL_RANK", 0, local_size - 1) if env.get("LOCAL_RANK") else None,
        anew=env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
    )


def _number(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = env.get(name, "")
    if not text:
        raise ValueError(f"{name}: must be from {low} to {high}, as WORLD_SIZE is {env['WORLD_SIZE']}; it is unset")
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not low <= int(text) <= high:
        raise ValueError(f"{name}: must be from {low} to {high}, got {text!r}")
    return int(text)
