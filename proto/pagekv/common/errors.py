"""Every error that crosses the wire: one exception class each, and nothing of gRPC.

A backend or a benchmark that raises or catches errors imports this module alone, and runs where neither gRPC nor
google.rpc is installed. `pagekv.common.statuses` has each error's gRPC status.
"""

from __future__ import annotations


class PageKVError(Exception):
    """Base of every error with a place in the status table."""


class InvalidRequest(PageKVError):
    """A field is out of its bounds. `field` is the proto path, `description` says the bounds and the value."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class AlreadyExists(InvalidRequest):
    """The value of `field` is taken."""


class NotFound(PageKVError):
    """A named thing does not exist."""


class Overloaded(PageKVError):
    """A bounded queue is full; come back in `retry_delay_s` seconds."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class LimitExceeded(PageKVError):
    """A limit of the deployment does not allow a request now; the message has the numbers needed and available."""


class OutOfMemory(PageKVError):
    """The pools asked for do not fit."""


class Unavailable(PageKVError):
    """The process does not serve now (starting, draining, executor lost); come back in `retry_delay_s` seconds."""

    def __init__(self, message: str, retry_delay_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class FailedPrecondition(PageKVError):
    """Refused in the present state."""


class StaleEpoch(PageKVError):
    """The work belongs to an epoch that is over."""


class FellBehind(PageKVError):
    """The reader of a stream took too little for too long; start again from the beginning."""


class ComputationFailed(PageKVError):
    """The model cannot compute the request: every attempt failed."""


class NotImplementedYet(PageKVError):
    """The RPC is declared and not served by this version."""
