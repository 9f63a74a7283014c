"""Files that are read again when they change, such as certificates, without a signal and without a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pagekv.common.logs import Log

log = Log(__name__)

# Seconds between two checks of the files: a rotation need not be noticed sooner.
INTERVAL_S = 1.0
# Checks after which files that could not be used are read again, although they have not changed: a certificate may have
# become valid, or a descriptor free.
RETRY_CHECKS = 10

_State = tuple[tuple[int, ...] | None, ...]


class WatchedFiles:
    """Several files that are one configuration, such as a certificate and its key."""

    def __init__(
        self,
        what: str,
        paths: Iterable[Path],
        reload: Callable[[], Callable[[], None] | None],
        at_each_check: Callable[[], None] = lambda: None,
    ) -> None:
        """To be made before the files are read for the first time, so that no change is missed.

        `what` names the configuration in logs and metrics. `reload` reads the files and applies them. If they cannot be
        used, it raises ValueError or OSError and changes nothing. It is called on another thread. It may return a
        function that does the rest on the event loop, and that may raise in the same way. `at_each_check` is called
        on the event loop at each check, whether files have changed or not.
        """
        self.what = what
        self._paths = tuple(paths)
        self._reload = reload
        self._at_each_check = at_each_check
        self._read = self._state()
        # Words of the error for which the present files are not in use; empty if they are.
        self._error = ""

    @property
    def are_refused(self) -> bool:
        """Whether the present files cannot be used, so that the earlier content stays in force."""
        return bool(self._error)

    async def watch(self, interval_s: float = INTERVAL_S) -> None:
        """Checks the files every `interval_s` seconds, for ever. Files that have changed are reloaded when they have
        stayed the same for one interval, because a certificate and its key are not replaced at the same moment. If they
        cannot be used, the former content stays in use, the error is logged, and the files are tried again every
        `RETRY_CHECKS` intervals, which logs only another error.
        """
        seen = self._read
        checks = 0
        while True:
            await asyncio.sleep(interval_s)
            self._at_each_check()
            now = self._state()
            checks += 1
            if now == seen and (now != self._read or (self._error and checks >= RETRY_CHECKS)):
                checks = 0
                await self._reload_now(changed=now != self._read)
                self._read = now
            seen = now

    async def _reload_now(self, *, changed: bool) -> None:
        try:
            apply = await asyncio.to_thread(self._reload)
            if apply is not None:
                apply()
        except Exception as error:
            # Errors of any kind: if the watch ended, old keys and certificates would stay in use for ever.
            if changed or repr(error) != self._error:
                known = isinstance(error, (OSError, ValueError))
                words = "files have changed and cannot be used; the earlier content stays in force"
                log.error(words, error=error, exc_info=None if known else error)
            self._error = repr(error)
        else:
            self._error = ""
            log.info("files have changed and were read again", what=self.what)

    def _state(self) -> _State:
        return tuple(state_of(path) for path in self._paths)


def state_of(path: Path | str) -> tuple[int, ...] | None:
    """Numbers that change with the file's content, permissions, or a link to it; None if there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        # ValueError: a null byte in the path.
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
