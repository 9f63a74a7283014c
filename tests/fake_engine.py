"""An engine for tests of the services: it does what the test says, and remembers what it was told."""

from __future__ import annotations

from dataclasses import fields

from pagekv.common.errors import AlreadyExists
from pagekv.kvmanager.engine import BlockView, ModelInfo, PrefixMatch, SequenceView, Stats
from pagekv.kvmanager.request import CacheIdentity, FinishReason, GenerateCommand, RequestStream, SequenceDelta

MODEL = ModelInfo(
    model_id="small",
    model_fingerprint="f00d",
    max_model_len=64,
    vocab_size=400,
    eos_token_ids=(1,),
    block_size=4,
    num_device_blocks=10,
    num_host_blocks=0,
    backend="oracle",
)


class FakeEngine:
    """Implements `engine.Engine`. The test pushes deltas with `push`; nothing happens by itself."""

    def __init__(self, model: ModelInfo | None = MODEL) -> None:
        self.model = model
        self.live: dict[str, RequestStream] = {}
        self.commands: list[GenerateCommand] = []
        self.aborted: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        # Streams whose readers went away.
        self.left: list[RequestStream] = []
        self.lookups: list[tuple[list[int], CacheIdentity]] = []
        self.refusal: Exception | None = None
        self.held_blocks = False

    def submit(self, command: GenerateCommand) -> RequestStream:
        if self.refusal is not None:
            raise self.refusal
        if command.request_id in self.live:
            raise AlreadyExists("request_id", f"{command.request_id!r} is in use by a running request")
        self.commands.append(command)
        stream = self.live[command.request_id] = RequestStream(command.request_id, command.n)
        return stream

    def push(self, request_id: str, *tokens: int, index: int = 0, finish: FinishReason | None = None) -> None:
        """Tokens for one sequence; a finish of STOP says that the last of them is a stop token."""
        stop = tokens[-1] if finish is FinishReason.STOP else None
        self.live[request_id].push(
            SequenceDelta(index, list(tokens), cached_tokens=4, preemptions=2, finish=finish, stop_token_id=stop)
        )

    def abort(self, request_id: str) -> bool:
        stream = self.live.pop(request_id, None)
        if stream is None:
            return False
        self.aborted.append(request_id)
        for index in range(len(stream._open)):
            stream.push(SequenceDelta(index, finish=FinishReason.ABORT))
        return True

    def cancel(self, stream: RequestStream) -> None:
        self.left.append(stream)
        if self.live.get(stream.request_id) is stream:
            self.abort(stream.request_id)

    def stop_sequence(self, stream: RequestStream, index: int) -> None:
        self.stopped.append((stream.request_id, index))

    def stats(self) -> Stats:
        numbers = {field.name: number for number, field in enumerate(fields(Stats)) if field.type != "bool"}
        return Stats(**numbers, executor_attached=True)

    def lookup_prefix(self, token_ids: list[int], identity: CacheIdentity) -> PrefixMatch:
        self.lookups.append((token_ids, identity))
        return PrefixMatch(device_tokens=8, host_tokens=4, block_ids=[7, 3])

    def block_tables(self, request_id: str) -> list[SequenceView] | None:
        if request_id not in self.live:
            return None
        return [SequenceView(0, "running", 9, 8, [7, 3, 1], [b"\x01" * 32, b"\x02" * 32])]

    def list_blocks(self, start: int, limit: int, state: str | None) -> tuple[list[BlockView], int | None]:
        kinds = [("free", 0, b""), ("cached", 0, b"\xcc"), ("active", 2, b"\xaa")]
        blocks = [
            BlockView(i, kinds[i % 3][1], kinds[i % 3][2], b"")
            for i in range(start, 10)
            if state in (None, kinds[i % 3][0])
        ]
        return blocks[:limit], (blocks[limit].block_id if len(blocks) > limit else None)

    def reset_prefix_cache(self) -> int | None:
        return None if self.held_blocks else 5
