"""Upper bounds for the encoded parts of a step, in bytes, so that no step is too large for an executor (rule P13)."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES

# Bytes of a new sequence without its tokens and block table; of 1,024 banned and 1,024 biased token ids; and of one
# sequence's share of the columns, which name it a few times and include one copy for it.
SEQUENCE_BYTES = 128
LISTS_BYTES = 16 * 2**10
COLUMNS_BYTES = 40


@dataclass(frozen=True, slots=True)
class IdBytes:
    """Most bytes of an encoded token id, device block id and host block id."""

    token: int = 5
    device_block: int = 5
    host_block: int = 5

    def entry(self, num_tokens: int, num_blocks: int, *, lists: bool) -> int:
        """Bytes of a sequence that enters the executor. `lists`: it may have banned or biased token ids."""
        besides = SEQUENCE_BYTES + (LISTS_BYTES if lists else 0)
        return besides + self.token * num_tokens + self.device_block * num_blocks

    def copies(self, count: int) -> int:
        """Bytes of `count` block copies, in or out."""
        return (self.device_block + max(self.device_block, self.host_block)) * count

    def longest_sequence(self, block_size: int, max_running: int, *, host: bool) -> int:
        """Tokens of the longest sequence that can enter in one step. `host`: in that step its blocks may be copied in
        from the host pool, and other blocks out to make room.
        """
        block = self.device_block + (self.copies(2) if host else 0)
        room = MAX_RECEIVE_BYTES - COLUMNS_BYTES * max_running - self.entry(0, 1, lists=True) - block
        return max(1, room * block_size // (self.token * block_size + block))


def id_bytes(num_ids: int) -> int:
    """Bytes of the largest id below `num_ids`, encoded as a protobuf varint."""
    return -(-max(1, (num_ids - 1).bit_length()) // 7)
