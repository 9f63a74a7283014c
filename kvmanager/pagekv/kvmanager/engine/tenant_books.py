"""Keeps the accounts of tenants: counts what their requests use, and tells the scheduler their limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from pagekv.kvmanager.access.toml_file import TomlFileError
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import Admitted
from pagekv.kvmanager.tenants.tenants_file import TenantsFile

# Seconds between two looks at the blocks that tenants have.
BLOCKS_LOOKED_AT_S = 0.5


class TenantBooks:
    """Used by the engine loop alone. Does nothing without identities."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._clock = time.monotonic
        # Output tokens by tenant number that are in the accounts already.
        self._booked = np.zeros(1, np.int64)
        # Blocks by tenant number, at the latest look.
        self._blocks: dict[int, int] = {}
        self._looked_at = self._clock()

    def configure(self, wake: Callable[[], None]) -> None:
        """Tells the scheduler the limits, now and whenever they change; `wake` is called after each change. Raises
        TomlFileError if the floors do not fit into the pool.
        """
        accounts = self._state.accounts
        self._check(accounts.file)
        accounts.check = self._check_reload

        def changed() -> None:
            self._tell()
            wake()

        accounts.on_change = changed
        if accounts.all():
            self._tell()

    def _check_reload(self, file: TenantsFile) -> None:
        # Unchanged floors need no check: if the pool is smaller than the first one, they were fitted to it.
        if _floors(file) != _floors(self._state.accounts.file):
            self._check(file)

    def _check(self, file: TenantsFile) -> None:
        num_blocks = self._state.serving().pool.num_blocks
        if file.num_floor_blocks > num_blocks:
            name = max(file.tenants, key=lambda name: file.tenants[name].floor_blocks)
            floors = f"the floors are {file.num_floor_blocks} blocks together, the pool has {num_blocks}"
            raise TomlFileError(f"{file.path}: tenants.{name}.floor_blocks: {floors}")

    def _tell(self) -> None:
        limits = {account.tenant.number: account.limits for account in self._state.accounts.all()}
        caps = {number: Cap(each.max_running, each.max_blocks) for number, each in limits.items()}
        self._state.serving().set_tenants(
            {number: each.weight for number, each in limits.items()},
            {number: each.floor_blocks for number, each in limits.items() if each.floor_blocks},
            {number: cap for number, cap in caps.items() if cap != Cap()},
        )

    # -- use

    def begin(self, request: LiveRequest) -> None:
        """Counts a request that was accepted."""
        name, command = request.command.tenant.name, request.command
        if name:
            account = self._state.accounts.of(name)
            account.live += 1
            account.usage.requests += 1
            account.tokens.take(len(command.prompt_ids))

    def end(self, request: LiveRequest) -> None:
        """Counts a request that has ended."""
        account = self._state.accounts.known(request.command.tenant.name)
        if account is not None:
            account.live -= 1

    def count_admissions(self, admitted: Iterable[Admitted]) -> None:
        """Counts the prompts of sequences that got their blocks for the first time."""
        for each in admitted:
            account = self._state.accounts.known(each.sequence.request.command.tenant.name)
            if account is not None:
                account.usage.prompt_tokens += each.sequence.num_prompt
                account.usage.cached_tokens += each.sequence.cached_tokens or 0

    def count_outputs(self) -> None:
        """Counts the output tokens of a step, and now and then the blocks that tenants have."""
        accounts = self._state.accounts.all()
        if not accounts:
            return
        outputs = self._state.serving().waiting.served.outputs
        if len(self._booked) < len(outputs):
            self._booked = np.append(self._booked, np.zeros(len(outputs) - len(self._booked), np.int64))
        fresh = np.flatnonzero(outputs - self._booked)
        if len(fresh):
            by_number = {account.tenant.number: account for account in accounts}
            for number in fresh.tolist():
                tokens = int(outputs[number] - self._booked[number])
                if number in by_number:
                    by_number[number].usage.output_tokens += tokens
                    by_number[number].tokens.take(tokens)
            self._booked[:] = outputs
        now = self._clock()
        if now - self._looked_at >= BLOCKS_LOOKED_AT_S:
            # Counts with the blocks of the look before: without steps they do not change, however long ago that was.
            for account in accounts:
                before = self._blocks.get(account.tenant.number, 0)
                account.usage.block_seconds += before * (now - self._looked_at)
            tenants = self._state.serving().pool.tenants
            if tenants is not None:
                numbers = [account.tenant.number for account in accounts]
                self._blocks = {number: tenants.footprint(number) for number in numbers}
            self._looked_at = now


def _floors(file: TenantsFile) -> dict[str, int]:
    return {name: limits.floor_blocks for name, limits in file.tenants.items() if limits.floor_blocks}
