"""The sources of the key set for tokens. If reading fails, the last good set stays: an outage locks nobody out."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from pagekv.kvmanager.access.json_web_keys import MAX_KEY_SET_BYTES, KeySet, read_key_set
from pagekv.kvmanager.access.key_set_download import LIMIT_S, KeySetDownloadError, download_key_set

# Seconds after which a set from a URL is read again; and least seconds between two attempts, because anybody can make
# tokens that name unknown keys.
REFRESH_S = 300.0
RETRY_S = 30.0

_log = logging.getLogger(__name__)


class KeySetFile:
    """A key set in a file, which is read again when it is replaced or written to."""

    def __init__(self, path: Path) -> None:
        # Number of failed attempts to read it.
        self.refresh_failures = 0
        self._path = path
        self._keys: KeySet | None = None
        # State of the file at the latest attempt, good or bad; () before the first.
        self._seen: tuple[int, ...] | None = ()

    def current(self) -> KeySet | None:
        """The last good set; None before the first. Reads the file only if its state has changed."""
        seen = self._state()
        if seen != self._seen:
            self._seen = seen
            try:
                self._keys = _kept(self._keys, read_key_set(self._read()))
            except (OSError, ValueError) as error:
                self.refresh_failures += 1
                _log.warning("key set of tokens: %s: %s", self._path, error)
        return self._keys

    async def newer(self) -> KeySet | None:
        """As `current`, which always notices a change."""
        return self.current()

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)

    def _read(self) -> bytes:
        if not self._path.is_file():
            raise FileNotFoundError("must be a regular file")
        with self._path.open("rb") as file:
            return file.read(MAX_KEY_SET_BYTES + 1)


class KeySetUrl:
    """A key set at a URL, read in a thread. There is one attempt at a time, which all callers share."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.refresh_failures = 0
        self._url = url
        self._clock = clock
        self._keys: KeySet | None = None
        self._read_at = self._tried_at = -math.inf
        self._refresh: asyncio.Task[None] | None = None

    def current(self) -> KeySet | None:
        """The last good set; None before the first. Starts to read an old set again, but does not wait for it."""
        if self._keys is not None and self._clock() - self._read_at >= REFRESH_S:
            self._start()
        return self._keys

    async def newer(self) -> KeySet | None:
        """The set after reading it again, unless the last attempt is recent; for a token whose key is missing."""
        self._start()
        if self._refresh is not None:
            # Not cancelled with the caller, because others may wait for it, too.
            await asyncio.wait({self._refresh}, timeout=LIMIT_S)
        return self._keys

    def _start(self) -> None:
        if self._refresh is not None and not self._refresh.done():
            return
        now = self._clock()
        self._refresh = None
        if now - self._tried_at >= RETRY_S:
            self._tried_at = now
            self._refresh = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        try:
            keys = await asyncio.to_thread(lambda: read_key_set(download_key_set(self._url)))
        except (KeySetDownloadError, ValueError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self.refresh_failures += 1
            _log.warning("key set of tokens: %s: %s", self._url, error)
        else:
            self._keys = _kept(self._keys, keys)
            self._read_at = self._clock()


def _kept(old: KeySet | None, new: KeySet) -> KeySet:
    """The old set if the new one is equal, so that tokens that were verified with it stay cached."""
    return old if old is not None and old.digest == new.digest else new
