"""The errors that cross the wire, one exception class each, independent of gRPC.

A backend or a benchmark that raises or catches errors imports only this module, so it runs where neither gRPC nor
google.rpc is installed. `pagekv.common.statuses` has the gRPC status of each class.
"""

from __future__ import annotations

from typing import Any

# Attributes that go into ErrorInfo.metadata, if an error has them and they are set.
FACTS = ("rule", "limit", "flag", "needed_blocks", "available_blocks", "pinned_blocks", "server_version")


class PageKVError(Exception):
    """Base of all errors in the status table."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles, which cross to other processes: Python's own way calls the class with the message
        alone, and an error that cannot be read ends a whole pool of processes.
        """
        return _restored, (type(self), self.args), self.__dict__

    @property
    def metadata(self) -> dict[str, str]:
        """The attributes in FACTS that are set, as text by name: ErrorInfo.metadata of the status."""
        return {name: str(fact) for name in FACTS if (fact := getattr(self, name, None)) not in (None, "")}


def _restored(cls: type[PageKVError], args: tuple[Any, ...]) -> PageKVError:
    """An error with these arguments, and no attributes yet."""
    error = cls.__new__(cls)
    error.args = args
    return error


class InvalidRequest(PageKVError):
    """A field is out of its bounds. `field` is its proto path, "" if that is not known. `description` has the bounds
    and the value. `rule` is the rule of the step contract that is broken, "" for other calls.
    """

    def __init__(self, field: str, description: str, rule: str = "") -> None:
        message = f"{field}: {description}" if field else description
        super().__init__(f"{message} ({rule})" if rule else message)
        self.field = field
        self.description = description
        self.rule = rule


class AlreadyExists(InvalidRequest):
    """The value of `field` is in use: a `kind` of this `name` exists."""

    def __init__(self, field: str, description: str, kind: str = "", name: str = "") -> None:
        super().__init__(field, description)
        self.kind = kind
        self.name = name


class NotFound(PageKVError):
    """No `kind` (such as "request") of this `name` exists."""

    def __init__(self, message: str, kind: str = "", name: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class Overloaded(PageKVError):
    """A bounded queue is full, there are as many watches as there can be, or a tenant exceeded a rate or has as many
    open calls or watches as it may. `limit` is the bound, and `flag` the flag that sets it, "" if no flag does. The
    caller may try again after `retry_delay_s` seconds.
    """

    def __init__(self, message: str, retry_delay_s: float, limit: int | None = None, flag: str = "") -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.limit = limit
        self.flag = flag


class LimitExceeded(PageKVError):
    """A limit of the deployment, or of the tenant, does not allow a call now. Numbers that do not apply are None.

    `needed_blocks`: blocks that the call needs; `available_blocks`: blocks that it could get; `pinned_blocks`: blocks
    that pins hold; `limit`: the limit itself; `flag`: the flag that sets it, "" if no flag does.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_blocks: int | None = None,
        available_blocks: int | None = None,
        pinned_blocks: int | None = None,
        limit: int | None = None,
        flag: str = "",
    ) -> None:
        super().__init__(message)
        self.needed_blocks = needed_blocks
        self.available_blocks = available_blocks
        self.pinned_blocks = pinned_blocks
        self.limit = limit
        self.flag = flag


class OutOfMemory(PageKVError):
    """The requested pools do not fit into memory."""


class Unavailable(PageKVError):
    """The process does not serve now (it is starting, or its executor is lost). The caller may try again after
    `retry_delay_s` seconds. `server_version`: the version of the process, "" if it is not given.
    """

    def __init__(self, message: str, retry_delay_s: float = 1.0, server_version: str = "") -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.server_version = server_version


class Draining(Unavailable):
    """The process shuts down. A stream that ends with this error can be resumed at the process that replaces it."""


class FailedPrecondition(PageKVError):
    """Refused in the present state: a condition of this `kind` (a word in capitals) is not met by `subject`."""

    def __init__(self, message: str, kind: str = "STATE", subject: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.subject = subject


class StaleEpoch(PageKVError):
    """The work belongs to an epoch that is over."""


class FellBehind(PageKVError):
    """The reader of a stream was too slow; it has to start again from the beginning."""


class RevisionGone(PageKVError):
    """The changes after the requested revision are no longer kept; the reader has to start again from the beginning."""


class ComputationFailed(PageKVError):
    """The model cannot compute the request: every attempt failed."""


class SequenceFailed(PageKVError):
    """The executor reported that a sequence cannot continue, for example because its logits are not numbers."""


class Unauthenticated(PageKVError):
    """The server, or a proxy before it, does not know the caller."""


class PermissionDenied(PageKVError):
    """The server, or a proxy before it, does not allow the call to this caller."""


class NotImplementedYet(PageKVError):
    """The RPC is part of the contract, but this version does not serve it."""
