"""Every tenant's account: its present limits and its usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagekv.common.errors import LimitExceeded, Overloaded, PermissionDenied
from pagekv.common.watched_files import WatchedFiles
from pagekv.kvmanager.access.toml_file import TomlFileError
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.kvmanager.tenants.tenants_file import MAX_TENANTS, NO_FILE, TenantsFile, read_tenants
from pagekv.kvmanager.tenants.token_bucket import TokenBucket

# A full bucket holds the tokens of a minute, or the text of two seconds.
TOKENS_BURST_S, TEXT_BURST_S = 60.0, 2.0
# Tenants that the file does not name, beyond MAX_TENANTS of all, share an account of this name, which no tenant can
# have.
OTHERS = "*"


@dataclass(slots=True)
class TenantUsage:
    """Counts since the manager started."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    # The tenant's footprint, integrated over time: blocks times seconds.
    block_seconds: float = 0.0
    # By the name of the limit: refused calls.
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, other: TenantUsage) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.requests += other.requests
        self.block_seconds += other.block_seconds
        self.refusals.update(other.refusals)


@dataclass(slots=True, eq=False)
class Account:
    """The account of one tenant, or of all tenants beyond MAX_TENANTS together. It lives as long as the manager."""

    tenant: Tenant
    limits: TenantLimits = field(default_factory=TenantLimits)
    usage: TenantUsage = field(default_factory=TenantUsage)
    # Live requests, open watches and open gRPC calls.
    live: int = 0
    watchers: int = 0
    calls: int = 0
    tokens: TokenBucket = field(default_factory=lambda: TokenBucket(TOKENS_BURST_S))
    text: TokenBucket = field(default_factory=lambda: TokenBucket(TEXT_BURST_S))

    def set_limits(self, limits: TenantLimits) -> None:
        self.limits = limits
        per_minute, per_s = limits.tokens_per_minute, limits.tokenized_bytes_per_second
        self.tokens.set_rate(None if per_minute is None else per_minute / 60)
        self.text.set_rate(None if per_s is None else float(per_s))

    def check_text(self) -> None:
        """Raises Overloaded while the tenant has sent more text than its rate allows."""
        self._check_rate("tokenized_bytes_per_second", self.text, self.limits.tokenized_bytes_per_second)

    def check_tokens(self) -> None:
        """Raises Overloaded while the tenant has used more tokens than its rate allows."""
        self._check_rate("tokens_per_minute", self.tokens, self.limits.tokens_per_minute)

    def check_count(self, limit: str, held: int, more: int = 1, retry_delay_s: float = 0.0) -> None:
        """Raises LimitExceeded if `held` + `more` is beyond this limit; Overloaded instead if a delay is given."""
        most = getattr(self.limits, limit)
        if most is None or held + more <= most:
            return
        self.usage.refusals[limit] += 1
        words = f"{limit}: your tenant has {held} of at most {most}, and asked for {more} more"
        if retry_delay_s:
            raise Overloaded(words, retry_delay_s, most)
        raise LimitExceeded(words, limit=most)

    def _check_rate(self, limit: str, bucket: TokenBucket, rate: int | None) -> None:
        wait_s = bucket.wait_s()
        if wait_s:
            assert rate is not None
            self.usage.refusals[limit] += 1
            raise Overloaded(f"{limit}: your tenant may use {rate}, and has used more", wait_s, rate)


class Accounts:
    """The accounts of a manager's tenants, by name. A manager without identities has only NO_TENANT."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the tenants file, read again when it changes. Raises TomlFileError if it cannot be used."""
        self._path = path
        self.files = None if path is None else WatchedFiles("tenants", [path], self._reload)
        # The present limits. Only this class changes them.
        self.file = NO_FILE if path is None else read_tenants(path)
        self._by_name: dict[str, Account] = {}
        self._others: Account | None = None
        # Called after limits have changed or an account was added.
        self.on_change: Callable[[], None] = lambda: None
        # Raises ValueError for a file whose floors do not fit the pool.
        self.check: Callable[[TenantsFile], None] = lambda file: None
        self._none = Account(NO_TENANT)
        for name in self.file.tenants:
            self._open(name)

    def all(self) -> list[Account]:
        accounts = list(self._by_name.values())
        return accounts if self._others is None else [*accounts, self._others]

    def of(self, name: str) -> Account:
        """The account of a tenant. Raises PermissionDenied if the file neither names it nor has a default."""
        if not name:
            return self._none
        if self._limits(name) is None:
            raise PermissionDenied(f"the tenant {name} is not known")
        known = len(self._by_name), self._others
        account = self._by_name.get(name) or self._open(name)
        if (len(self._by_name), self._others) != known:
            self.on_change()
        return account

    def known(self, name: str) -> Account | None:
        """The account of a tenant that was named or has called before; None if there is none."""
        return self._by_name.get(name, self._others) if name else None

    def with_bounded_calls(self, name: str) -> Account | None:
        """The account of a tenant whose open calls are bounded. None if they are not, or if the tenant is not known."""
        limits = self._limits(name) if name else None
        return self.of(name) if limits is not None and limits.max_calls is not None else None

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name, with the number of its account. Raises as `of` does."""
        number = self.of(name).tenant.number
        return Tenant(name, number) if name else NO_TENANT

    def _limits(self, name: str) -> TenantLimits | None:
        return self.file.tenants.get(name, self.file.default)

    def _open(self, name: str) -> Account:
        """A new account, or the shared one beyond MAX_TENANTS. The caller has to call `on_change`."""
        if len(self._by_name) >= MAX_TENANTS:
            if self._others is None:
                self._others = Account(Tenant(OTHERS, MAX_TENANTS + 1))
                self._others.set_limits(self.file.default or TenantLimits())
            return self._others
        account = self._by_name[name] = Account(Tenant(name, len(self._by_name) + 1))
        account.set_limits(self._limits(name) or TenantLimits())
        return account

    def _reload(self) -> Callable[[], None]:
        assert self._path is not None
        file = read_tenants(self._path)
        return lambda: self._replace(file)

    def _replace(self, file: TenantsFile) -> None:
        """Applies another file; if it raises, nothing has changed. A tenant that is no longer known keeps its limits
        for its present requests, but not its floor, because only the floors of the file were checked.
        """
        self.check(file)
        new = [name for name in file.tenants if name not in self._by_name]
        # In the shared account a named tenant would have the default limits instead of its own.
        if len(self._by_name) + len(new) > MAX_TENANTS:
            raise TomlFileError(
                f"{self._path}: tenants: {len(new)} are new and {len(self._by_name)} have accounts until the "
                f"manager ends; there may be {MAX_TENANTS} at most: restart the manager"
            )
        self.file = file
        for name, account in self._by_name.items():
            account.set_limits(self._limits(name) or replace(account.limits, floor_blocks=0))
        if self._others is not None:
            self._others.set_limits(file.default or self._others.limits)
        for name in new:
            self._open(name)
        self.on_change()
