"""Every error that crosses the wire: one exception class each, and nothing of gRPC.

A backend or a benchmark that raises or catches errors imports this module alone, and runs where neither gRPC nor
google.rpc is installed. `pagekv.common.statuses` has each error's gRPC status.
"""

from __future__ import annotations

# Attributes of errors that are facts for programs, where an error has them and they are set.
FACTS = ("rule", "limit", "flag", "needed_blocks", "available_blocks", "pinned_blocks", "server_version")


class PageKVError(Exception):
    """Base of every error with a place in the status table."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def metadata(self) -> dict[str, str]:
        """Facts for programs, by name: ErrorInfo.metadata of the status."""
        return {name: str(fact) for name in FACTS if (fact := getattr(self, name, None)) not in (None, "")}


class InvalidRequest(PageKVError):
    """A field is out of its bounds. `field` is the proto path, "" where it is not known; `description` says the bounds
    and the value; `rule` is the rule of the step contract that it breaks, "" for other calls.
    """

    def __init__(self, field: str, description: str, rule: str = "") -> None:
        message = f"{field}: {description}" if field else description
        super().__init__(f"{message} ({rule})" if rule else message)
        self.field = field
        self.description = description
        self.rule = rule


class AlreadyExists(InvalidRequest):
    """The value of `field` is taken: there is a `kind` of this `name`."""

    def __init__(self, field: str, description: str, kind: str = "", name: str = "") -> None:
        super().__init__(field, description)
        self.kind = kind
        self.name = name


class NotFound(PageKVError):
    """There is no `kind` ("request", say) of this `name`."""

    def __init__(self, message: str, kind: str = "", name: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name


class Overloaded(PageKVError):
    """A bounded queue is full: it holds `limit`, which `flag` sets; or a tenant took more than its rate, or has as many
    calls open as it may, `limit`. Come back in `retry_delay_s` seconds.
    """

    def __init__(self, message: str, retry_delay_s: float, limit: int | None = None, flag: str = "") -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.limit = limit
        self.flag = flag


class LimitExceeded(PageKVError):
    """A limit of the deployment, or of the tenant, does not allow a call now. Numbers that do not apply are None.

    `needed_blocks`: blocks that the call needs; `available_blocks`: those that there are for it; `pinned_blocks`: those
    that pins hold; `limit`: the limit itself; `flag`: the flag that sets it, "" where none does.
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
    """The pools asked for do not fit."""


class Unavailable(PageKVError):
    """The process does not serve now (starting, executor lost); come back in `retry_delay_s` seconds. `server_version`:
    of the process, "" where it does not say.
    """

    def __init__(self, message: str, retry_delay_s: float = 1.0, server_version: str = "") -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.server_version = server_version


class Draining(Unavailable):
    """The process shuts down. A stream that ends so can be resumed at the process that follows."""


class FailedPrecondition(PageKVError):
    """Refused in the present state: a condition of this `kind` (a word in capitals) is not met by `subject`."""

    def __init__(self, message: str, kind: str = "STATE", subject: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.subject = subject


class StaleEpoch(PageKVError):
    """The work belongs to an epoch that is over."""


class FellBehind(PageKVError):
    """The reader of a stream took too little for too long; start again from the beginning."""


class RevisionGone(PageKVError):
    """The changes after the revision asked for are no longer held; start again from the beginning."""


class ComputationFailed(PageKVError):
    """The model cannot compute the request: every attempt failed."""


class SequenceFailed(PageKVError):
    """The executor said that a sequence cannot go on, as when its logits are not numbers."""


class Unauthenticated(PageKVError):
    """The server, or a proxy before it, does not know the caller."""


class PermissionDenied(PageKVError):
    """The server, or a proxy before it, does not allow the call to this caller."""


class NotImplementedYet(PageKVError):
    """The RPC is declared and not served by this version."""
