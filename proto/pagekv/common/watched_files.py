"""Files that are read again when they change, such as certificates, without a signal and without a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pagekv.common.logs import Log

log = Log(__name__)

# Seconds between two looks at the files: a rotation need not be noticed sooner.
INTERVAL_S = 1.0

_State = tuple[tuple[int, ...] | None, ...]


class WatchedFiles:
    """Several files that are one configuration, such as a certificate and its key."""

    def __init__(self, what: str, paths: Iterable[Path], reload: Callable[[], Callable[[], None] | None]) -> None:
        """To be made before the files are read for the first time, so that no change is missed.

        `what` names the configuration in logs and metrics. `reload` reads the files and takes what they say; it raises
        ValueError or OSError, and changes nothing, where they cannot be used. It is called on another thread; a
        function that it returns is called on the event loop, and may raise and do the same.
        """
        self.what = what
        self.failures = 0
        self._paths = tuple(paths)
        self._reload = reload
        self._read = self._state()

    async def watch(self, interval_s: float = INTERVAL_S) -> None:
        """Looks every `interval_s` seconds, for ever, and reloads the files once they have changed and stayed the same
        for as long, since a certificate and its key are not replaced at the same moment. Where they cannot be used
        what was read before stays, and the error is logged and counted.
        """
        seen = self._read
        while True:
            await asyncio.sleep(interval_s)
            now = self._state()
            if now == seen and now != self._read:
                self._read = now
                try:
                    apply = await asyncio.to_thread(self._reload)
                    if apply is not None:
                        apply()
                except Exception as error:
                    # Of any kind: a watch that ended would go on with old keys and certificates for ever.
                    self.failures += 1
                    known = isinstance(error, (OSError, ValueError))
                    words = "files have changed and cannot be used; what was read before stays"
                    log.error(words, error=error, exc_info=None if known else error)
                else:
                    log.info("files were read again, for they have changed", what=self.what)
            seen = now

    def _state(self) -> _State:
        return tuple(_state_of(path) for path in self._paths)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """Numbers of which one changes when the file does, or who may read it, or a link to it; None where there is no
    file.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
