"""The flags of child processes that `pagekv up` itself must read: ports that only one of several processes can have,
the vocabulary of an oracle, and the time to end. No other flag is read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagekv.client.launcher.errors import StackError
from pagekv.common.flags import is_true, variable_of
from pagekv.common.models import DEMO, ModelNotFound, resolve_model

# Flags of the manager, and the default of the first flag.
EVENTS_FLAG, REPLAY_FLAG = "kv-events-endpoint", "kv-events-replay-endpoint"
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
_LAST_PORT = 65535
# Defaults of --grace-s, by process.
_GRACE_S = {"manager": 30.0, "executor": 10.0}
# Values of --tokenizer that mean the model's own tokenizer, and those that name none.
_MODELS_OWN = (None, "", "auto")
_NO_NAMES = (*_MODELS_OWN, "none")


def flag_value(name: str, args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The value of `--name` for a process started with `args` in `env`; None if the flag is not given."""
    flag, value = f"--{name}", env.get(variable_of(name))
    for word, following in zip(args, [*args[1:], None], strict=False):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def grace_s(role: str, args: Sequence[str], env: Mapping[str, str]) -> float:
    """Seconds that a manager or an executor (`role`), started with `args` in `env`, may take to finish what it does.
    The default for a value that is no number, which the process refuses.
    """
    try:
        return max(0.0, float(flag_value("grace-s", args, env) or ""))
    except ValueError:
        return _GRACE_S[role]


def event_endpoints(args: Sequence[str], env: Mapping[str, str], pairs: int) -> list[dict[str, str]]:
    """KV event addresses of each of `pairs` managers, started with `args` in `env`, by the flags' names. Empty if no
    events are published; "" for an address that is not set.

    The first manager (0) has the addresses of its flags; the others get higher ports, or a number at the end of an ipc
    path. Raises StackError if ports run out.
    """
    given = [word for word in args if word in ("--kv-events", "--no-kv-events")]
    publishes = given[-1] == "--kv-events" if given else is_true(env.get(variable_of("kv-events"), ""))
    if not publishes:
        return [{}] * pairs
    endpoints = {EVENTS_FLAG: flag_value(EVENTS_FLAG, args, env) or DEFAULT_ENDPOINT}
    endpoints[REPLAY_FLAG] = flag_value(REPLAY_FLAG, args, env) or ""
    first, second = map(tcp_port, endpoints.values())
    apart = abs(first - second) if first and second else 0
    # With this distance between pairs no two sockets get the same port.
    stride = 1 if apart >= pairs else apart + 1
    return [
        {name: _moved(name, endpoint, pair, stride) for name, endpoint in endpoints.items()} for pair in range(pairs)
    ]


def _moved(name: str, endpoint: str, pair: int, stride: int) -> str:
    """`endpoint` for a pair. Port 0, and text that is not a socket address, are passed on unchanged: the manager
    handles them.
    """
    if pair and endpoint.startswith("ipc://"):
        return f"{endpoint}-{pair + 1}"
    port = tcp_port(endpoint)
    if not pair or not port:
        return endpoint
    if port + pair * stride > _LAST_PORT:
        raise StackError(f"--{name} {endpoint}: leaves no port for pair {pair + 1}; choose a lower one")
    return f"{endpoint.rpartition(':')[0]}:{port + pair * stride}"


def tcp_port(endpoint: str) -> int:
    """The port of tcp://host:port; 0 for any other text."""
    digits = endpoint.rpartition(":")[2]
    if not endpoint.startswith("tcp://") or not digits.isascii() or not digits.isdigit() or int(digits) > _LAST_PORT:
        return 0
    return int(digits)


def is_bare_oracle(executor_args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the executor is an oracle without a model, which has no tokenizer."""
    return flag_value("backend", executor_args, env) == "oracle" and not flag_value("model", executor_args, env)


def tokenizer_name(manager_args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The tokenizer that the manager's flags name; None if they name none."""
    name = flag_value("tokenizer", manager_args, env)
    return None if name in _NO_NAMES else name


def takes_models_tokenizer(manager_args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the manager's flags leave the choice of the tokenizer to the model."""
    return flag_value("tokenizer", manager_args, env) in _MODELS_OWN


def vocabulary_args(executor_args: Sequence[str], manager_args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """--vocab-size with the size of the manager's tokenizer, for an oracle that has no model and is given no size.
    Empty for a tokenizer that has to be downloaded or cannot be read: the manager reports that.
    """
    name = tokenizer_name(manager_args, env)
    if name is None or not is_bare_oracle(executor_args, env) or flag_value("vocab-size", executor_args, env):
        return []
    if name != DEMO and not os.path.isdir(os.path.expanduser(name)):
        return []
    try:
        return [f"--vocab-size={_vocabulary_size(resolve_model(name, weights=False))}"]
    except (ModelNotFound, OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _vocabulary_size(directory: Path) -> int:
    """One more than the highest id in tokenizer.json, whose vocabulary is a map to ids or, in Unigram, a list."""
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    highest: int = max([*ids, *(token["id"] for token in data.get("added_tokens", ()))])
    return highest + 1
