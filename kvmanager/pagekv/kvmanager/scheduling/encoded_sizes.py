"""Upper bounds of the bytes of a step's parts, so that no step is too large for an executor (rule P13)."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES

# A sequence without tokens and table; 1,024 ids banned and 1,024 biased; and a sequence's share of the columns, which
# name it a few times and have a copy of its own.
SEQUENCE_BYTES = 128
LISTS_BYTES = 16 * 2**10
COLUMNS_BYTES = 40


@dataclass(frozen=True, slots=True)
class IdBytes:
    """Bytes of a token id, and of a device and a host block's, at most."""

    token: int = 5
    device_block: int = 5
    host_block: int = 5

    def entry(self, num_tokens: int, num_blocks: int, *, lists: bool) -> int:
        """Bytes of a sequence that enters. `lists`: ids may be banned or biased."""
        besides = SEQUENCE_BYTES + (LISTS_BYTES if lists else 0)
        return besides + self.token * num_tokens + self.device_block * num_blocks

    def copies(self, count: int) -> int:
        """Bytes of so many copies of blocks, in or out."""
        return (self.device_block + max(self.device_block, self.host_block)) * count

    def longest_sequence(self, block_size: int, max_running: int, *, host: bool) -> int:
        """Tokens of the longest sequence that can enter; `host`: its blocks may be copied in, and others out for them,
        in the same step.
        """
        block = self.device_block + (self.copies(2) if host else 0)
        room = MAX_RECEIVE_BYTES - COLUMNS_BYTES * max_running - self.entry(0, 1, lists=True) - block
        return max(1, room * block_size // (self.token * block_size + block))


def id_bytes(num_ids: int) -> int:
    """Bytes of the largest of the ids below `num_ids`, as protobuf writes it."""
    return -(-max(1, (num_ids - 1).bit_length()) // 7)
