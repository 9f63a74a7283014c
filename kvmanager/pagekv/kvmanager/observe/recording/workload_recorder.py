"""`--record`: a workload trace of the requests in Mooncake's format, one JSON object a line, in order of arrival.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...], "block_size": tokens}

The timestamp counts from the beginning of the recording. There is one hash id for every `block_size` tokens of the
prompt, and one for a partial last block. Two prompts have equal ids exactly as far as their tokens and media are equal,
if tenant, namespace and adapter are equal, too. An id says nothing about its tokens: it is 53 bits of a SHA-256 chain
that begins with a secret of this recording, which is stored nowhere. `output_length` is that of the request's longest
sequence. Requests that ended without a token are left out.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.block_hash import (
    TOKEN_BYTES,
    block_digest,
    chain_digests,
    media_keys,
    root_digest,
    token_bytes,
)
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.scheduling.sequence import LiveRequest

# Most ended requests that wait for an earlier one, so that lines are in order of arrival. Beyond this number they are
# written, and the earlier request comes after them.
MAX_WAITING = 4096
# Blocks that are hashed before the thread lets other threads run.
_PIECE = 256


@dataclass(slots=True, eq=False)
class _Entry:
    command: GenerateCommand
    milliseconds: int
    # Tokens; None while the request goes on.
    output_length: int | None = None


class WorkloadRecorder(Observer):
    """Notes requests on the event loop; the file's thread hashes and writes."""

    def __init__(self, file: RecordingFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._begun = clock()
        self._salt = secrets.token_bytes(32)
        self._block_size = 0
        self._live: dict[LiveRequest, _Entry] = {}
        # In order of arrival; live requests, and those that wait for an earlier one.
        self._entries: deque[_Entry] = deque()

    def attached(self, model: EngineInfo, epoch: int) -> None:
        self._block_size = model.block_size

    def submitted(self, request: LiveRequest) -> None:
        if not self._file.over:
            entry = _Entry(request.command, int((self._clock() - self._begun) * 1000))
            self._live[request] = entry
            self._entries.append(entry)

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        entry = self._live.pop(request, None)
        if entry is None:
            return
        entry.output_length = _output_length(request)
        if self._file.over:
            self._live.clear()
            self._entries.clear()
            return
        while self._entries and self._entries[0].output_length is not None:
            self._write(self._entries.popleft())
        if len(self._entries) - len(self._live) > MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes all requests that have ended; to be called before the file is closed."""
        for entry in self._entries:
            if entry.output_length is not None:
                self._write(entry)
        self._entries = deque(entry for entry in self._entries if entry.output_length is None)

    def _write(self, entry: _Entry) -> None:
        if entry.output_length:
            # The prompt is kept until the line is written.
            self._file.write(partial(self._line, entry), 100 + 16 * len(entry.command.prompt_ids))

    def _line(self, entry: _Entry) -> bytes:
        """Called on the file's thread."""
        line = {
            "timestamp": entry.milliseconds,
            "input_length": len(entry.command.prompt_ids),
            "output_length": entry.output_length,
            "hash_ids": hash_ids(entry.command, self._block_size, self._salt),
            "block_size": self._block_size,
        }
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _output_length(request: LiveRequest) -> int:
    prompt = len(request.command.prompt_ids)
    outputs = [len(sequence.token_ids) - prompt for sequence in request.sequences]
    if request.search is not None and request.search.done:
        outputs += [len(result.token_ids) for result in request.search.results()]
    return max(outputs, default=0)


def hash_ids(command: GenerateCommand, block_size: int, salt: bytes) -> list[int]:
    """An id for each block of the prompt, a partial last one too. Another `salt` gives incomparable ids."""
    identity, prompt = command.identity, command.prompt_ids
    parent: bytes = root_digest("trace", identity.namespace, identity.adapter_id, salt, identity.tenant)
    digests: list[bytes] = []
    for start in range(0, len(prompt), _PIECE * block_size):
        tokens = token_bytes(prompt[start : start + _PIECE * block_size])
        digests += chain_digests(parent, tokens, block_size, identity.media, start // block_size)
        parent = digests[-1] if digests else parent
        tail = tokens[len(tokens) // TOKEN_BYTES // block_size * block_size * TOKEN_BYTES :]
        if tail:
            end = len(prompt)
            digests.append(block_digest(parent, tail, media_keys(identity.media, end // block_size * block_size, end)))
        time.sleep(0)
    # 53 bits, because every reader of JSON can represent such a number exactly.
    return [int.from_bytes(digest[:8], "big") >> 11 for digest in digests]
