"""Where the managers of several pairs publish their KV events: one address cannot be had twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagekv.client.launcher.child_flags import flag_value, switch_is_on

PUBLISH_FLAG, REPLAY_FLAG = "kv-events-endpoint", "kv-events-replay-endpoint"
# As the manager has it.
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """Of one manager; `replay_endpoint` empty: no replays."""

    endpoint: str
    replay_endpoint: str = ""

    def args(self) -> list[str]:
        """Flags of the manager that publishes there; the last ones count."""
        replay = [f"--{REPLAY_FLAG}={self.replay_endpoint}"] if self.replay_endpoint else []
        return [f"--{PUBLISH_FLAG}={self.endpoint}", *replay]


def endpoints_of_pairs(args: Sequence[str], env: Mapping[str, str], pairs: int) -> list[KvEventEndpoints]:
    """Of each manager started with `args` in `env`; empty where they publish nothing. The first one has what the flags
    say, the others the next ports, or a number behind an ipc path. Raises ValueError where ports run out.
    """
    if not switch_is_on("kv-events", args, env):
        return []
    publish = flag_value(PUBLISH_FLAG, args, env) or DEFAULT_ENDPOINT
    replay = flag_value(REPLAY_FLAG, args, env) or ""
    stride = _stride(tcp_port(publish), tcp_port(replay), pairs)
    return [
        KvEventEndpoints(_moved(PUBLISH_FLAG, publish, pair, stride), _moved(REPLAY_FLAG, replay, pair, stride))
        for pair in range(pairs)
    ]


def _stride(publish: int | None, replay: int | None, pairs: int) -> int:
    """Least distance of a pair's ports from the next one's with which no two sockets meet."""
    if not publish or not replay or publish == replay:
        return 1
    apart = abs(publish - replay)
    return next(stride for stride in range(1, pairs + 2) if apart % stride or apart >= stride * pairs)


def _moved(flag: str, endpoint: str, pair: int, stride: int) -> str:
    if not pair or not endpoint:
        return endpoint
    port = tcp_port(endpoint)
    if port is None:
        return f"{endpoint}-{pair + 1}" if endpoint.startswith("ipc://") else endpoint
    if not port:
        return endpoint
    if port + pair * stride > _LAST_PORT:
        raise ValueError(f"--{flag} {endpoint}: leaves no port for pair {pair + 1}; choose a lower one")
    return f"{endpoint.rpartition(':')[0]}:{port + pair * stride}"


def tcp_port(endpoint: str) -> int | None:
    """None for anything but tcp://host:port, which the manager may refuse by itself."""
    digits = endpoint.rpartition(":")[2]
    if not endpoint.startswith("tcp://") or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits) if int(digits) <= _LAST_PORT else None
