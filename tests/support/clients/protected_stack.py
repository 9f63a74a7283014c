"""A stack with mutual TLS everywhere and identities, and channels of callers to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from support.clients.certificates import Authority, Pair, client_credentials
from support.clients.stack import ORACLE, Stack, running_executor, running_manager

# Keys by the name of their identity, and what each may do.
KEYS = {"alice": "alice-key", "bob": "bob-key", "olga": "olga-key", "meter": "meter-key"}
ROLES = {"alice": ["generate"], "bob": ["generate"], "olga": ["generate", "observe", "operate"], "meter": ["observe"]}


def digest_of(key: str) -> str:
    """As identities.toml has it."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_section(name: str, key: str, roles: Sequence[str]) -> str:
    """The section of an API key in identities.toml."""
    return f'[keys.{name}]\nsha256 = "{digest_of(key)}"\nroles = {list(roles)!r}\n'.replace("'", '"')


def write_identities(path: Path, *more: str) -> None:
    """The identities of KEYS, with further sections behind them."""
    sections = [key_section(name, key, ROLES[name]) for name, key in KEYS.items()]
    draft = path.with_suffix(".new")
    draft.touch(0o600)
    draft.write_text("\n".join([*sections, *more]))
    draft.replace(path)


@dataclass
class ProtectedStack:
    """The stack, its files, and the authority that signed its certificates."""

    stack: Stack
    folder: Path
    authority: Authority
    identities: Path
    manager_pair: Pair
    client_pair: Pair

    def credentials(self, pair: Pair | None) -> grpc.ChannelCredentials:
        """Of a client that trusts the authority, and shows `pair`."""
        return client_credentials(self.authority.ca, pair)

    def channel(self, pair: Pair | None = None) -> grpc.Channel:
        """A new connection to the manager; with the certificate of no identity, unless another is given."""
        # One of its own: gRPC shares connections of channels that are alike, and a handshake is what tests are about.
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(self.stack.target, self.credentials(pair or self.client_pair), options)


def tls_flags(pair: Pair, ca: Path) -> list[str]:
    """The flags of a process that serves with `pair` to clients whose certificates `ca` signed."""
    return [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={ca}"]


@contextmanager
def protected_stack(
    folder: Path,
    executor_args: Sequence[str] = ORACLE,
    manager_args: Sequence[str] = (),
    more_identities: Sequence[str] = (),
) -> Iterator[ProtectedStack]:
    """Both processes, serving."""
    authority = Authority(folder)
    executor_pair, manager_pair = authority.pair("pagekv-executor"), authority.pair("pagekv-manager")
    client_pair = authority.pair("nobody")
    ca, identities = authority.ca, folder / "identities.toml"
    write_identities(identities, *more_identities)
    to_executor = client_credentials(ca, manager_pair)
    to_manager = client_credentials(ca, client_pair)
    flags = [*tls_flags(manager_pair, ca), f"--executor-ca={ca}", f"--identities={identities}", *manager_args]
    with ExitStack() as opened:
        executor = opened.enter_context(
            running_executor([*executor_args, *tls_flags(executor_pair, ca)], folder, credentials=to_executor)
        )
        stack = opened.enter_context(running_manager(executor, flags, credentials=to_manager))
        stack.callers = grpc.composite_channel_credentials(to_manager, grpc.access_token_call_credentials(KEYS["olga"]))
        stack.secured = flags
        yield ProtectedStack(stack, folder, authority, identities, manager_pair, client_pair)
