"""Settings for the calls of a client: time limits, retries and metadata, checked once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Self, TypeAlias, TypedDict, TypeGuard

from pagekv.client.options import check_known, described
from pagekv.common.errors import InvalidRequest

__all__ = ["CallOptions", "WatchOptions"]

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_RESUME_TIMEOUT_S = 30.0
DEFAULT_MAX_RETRIES = 2
_LONGEST_S = 1e6
_MOST_RETRIES = 100
# Size of all entries together, each with the 32 bytes that HTTP/2 adds. It is half of what a manager accepts, because
# proxies and tracing add their own entries.
_METADATA_BYTES = 8192
_KEY = re.compile(r"[a-z0-9_.-]+")
# Keys of the connection or of gRPC itself, which drop, double or refuse such an entry (RFC 9113, 8.2.2 and 8.3.1).
_RESERVED_KEYS = (
    "connection", "content-length", "content-type", "host", "keep-alive", "proxy-connection", "te", "transfer-encoding",
    "upgrade", "user-agent",
)  # fmt: skip  # one a line would fill a screen
_VALUE = re.compile(r"[ -~]*")

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


@described
class CallOptions(TypedDict, total=False):
    """Keyword arguments of a client, where an option left out takes the default, and of `with_options`, where an option
    left out stays as it is.
    """

    timeout: float | None
    """Seconds for each call, above 0 and up to 1,000,000; None: no limit. Generating calls have a `timeout` of their
    own, watch_events has none. Default 30.
    """
    resume_timeout: float
    """Seconds for which a generation or a watch keeps trying to resume after its connection broke, 0 to 1,000,000; 0:
    it raises ConnectionLost at once. Default 30.
    """
    max_retries: int
    """Number of retries, 0 to 100, of a generation that was refused with Overloaded or Unavailable before its first
    token. Each retry waits for the delay that the server asks for; a delay above a minute raises the error. Default 2.
    """
    metadata: Metadata
    """Pairs of key and value sent with every call, such as ("authorization", "Bearer ..."), 8 KiB in all. The pairs of
    `with_options` are added to those of the client, and replace pairs with the same key. Keys are lower case, and not
    reserved for gRPC or the connection, such as grpc-timeout, content-type or user-agent. The value of a key that ends
    with -bin is bytes.
    """


@described
class WatchOptions(TypedDict, total=False):
    """Keyword arguments of `watch_events`. An option left out takes the default."""

    token_ids: bool
    """Whether blocks come with their token ids. Default True."""
    snapshot_only: bool
    """True: only the present tables, no changes. Default False."""
    start_revision: int
    """The revision of a `TableReplica` or of the last complete batch, to begin after it, without a snapshot. Default:
    none.
    """
    instance_id: str
    """The instance id that came with this revision; goes with `start_revision`."""
    progress_interval: float | None
    """Seconds of silence, 1 to 3600, after which an empty batch says that nothing changed. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """CallOptions with all values set. Raises InvalidRequest, which names the value that is out of bounds."""

    timeout: float | None = DEFAULT_TIMEOUT_S
    resume_timeout: float = DEFAULT_RESUME_TIMEOUT_S
    max_retries: int = DEFAULT_MAX_RETRIES
    # Values may be credentials.
    metadata: tuple[tuple[str, str | bytes], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        check_resume_timeout(self.resume_timeout)
        check_whole("max_retries", self.max_retries, 0, _MOST_RETRIES)
        _check_metadata(self.metadata)

    def changed(self, where: str, options: CallOptions, beside: Iterable[str] = ()) -> Self:
        """The settings with these options changed. Raises TypeError for unknown options, in a message that begins with
        `where` and also lists the arguments `beside`.
        """
        check_known(options, CallOptions, f"{where}: ", beside)
        values: dict[str, Any] = {**options}
        if "metadata" in values:
            added = as_metadata(values["metadata"])
            # A list: keys are checked only afterwards, and may be anything.
            given = [key for key, _ in added]
            values["metadata"] = (*(entry for entry in self.metadata if entry[0] not in given), *added)
        return replace(self, **values)


def check_timeout(value: object) -> None:
    """Raises InvalidRequest unless it is a time limit, or None for no limit. 0 is not allowed: it would be chance
    whether a call is answered in no time.
    """
    if value is not None and not (_is_number(value) and 0 < value <= _LONGEST_S):
        problem = f"must be above 0 and up to {_LONGEST_S:,.0f} seconds, or None for no limit, is {value!r:.80}"
        raise InvalidRequest("timeout", problem)


def check_resume_timeout(value: object) -> None:
    """Raises InvalidRequest unless it is a number of seconds to keep trying, 0 for not at all."""
    check_seconds("resume_timeout", value, 0, _LONGEST_S)


def check_seconds(name: str, value: object, least: float, most: float) -> None:
    """Raises InvalidRequest unless it is a number of seconds in these bounds."""
    if not (_is_number(value) and least <= value <= most):
        raise InvalidRequest(name, f"must be {least:,.0f} to {most:,.0f} seconds, is {value!r:.80}")


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raises InvalidRequest unless it is a whole number in these bounds; one of NumPy is one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise InvalidRequest(name, f"must be a whole number from {least} to {most}, is {value!r:.80}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_metadata(entries: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """The entries as pairs. Raises InvalidRequest for entries that are not pairs."""
    pairs = tuple(entries) if isinstance(entries, Iterable) else (entries,)
    for each in pairs:
        # A text of two characters, also as the key of a mapping, would count as a pair. No value is shown: it may be
        # secret.
        if not isinstance(each, (tuple, list)) or len(each) != 2:
            kind = type(each if isinstance(entries, (tuple, list)) else entries).__name__
            raise InvalidRequest("metadata", f"must be a list of pairs of key and value, is or has a {kind}")
    return tuple((key, value) for key, value in pairs)


def _check_metadata(entries: tuple[tuple[str, str | bytes], ...]) -> None:
    # Values may be credentials: no message shows one.
    for position, (key, value) in enumerate(entries):
        name = f"metadata[{position}]"
        if key in _RESERVED_KEYS:
            raise InvalidRequest(name, f"must not have one of gRPC's own keys {', '.join(_RESERVED_KEYS)}, is {key!r}")
        if not isinstance(key, str) or not _KEY.fullmatch(key) or key.startswith("grpc-"):
            problem = f"must have a key of a-z, 0-9, _, . and - that does not begin with grpc-, is {key!r:.80}"
            raise InvalidRequest(name, problem)
        if key.endswith("-bin"):
            if not isinstance(value, bytes):
                raise InvalidRequest(name, f"{key}: the value must be bytes, is a {type(value).__name__}")
        elif not isinstance(value, str) or not _VALUE.fullmatch(value):
            given = "has others" if isinstance(value, str) else f"is a {type(value).__name__}"
            raise InvalidRequest(name, f"{key}: the value must be text of printable ASCII characters, {given}")
    size = sum(len(key) + len(value) + 32 for key, value in entries)
    if size > _METADATA_BYTES:
        raise InvalidRequest("metadata", f"must be {_METADATA_BYTES} bytes at most with 32 for each entry, is {size}")
