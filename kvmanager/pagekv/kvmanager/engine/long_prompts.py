"""Long prompts on their way to the scheduler: the event loop is never held for a whole one."""

from __future__ import annotations

import asyncio
from array import array

from pagekv.kvmanager.engine.executor_wire import pack_token_ids
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt, slice_blocks


class LongPrompts:
    """Prepares prompts of more than one slice, one after the other, with a turn of the event loop behind each slice."""

    def __init__(self) -> None:
        # Held by the request that is entering; given in the order in which it is asked for, so requests keep theirs.
        self.turn = asyncio.Lock()

    async def prepare(self, command: GenerateCommand, root: bytes, table: PrefixTable) -> PreparedPrompt | None:
        """A prepared prompt for the command; None, at once, for a prompt that fits into a slice. `root`: the parent
        digest of its first block.
        """
        media, num_tokens = command.identity.media, len(command.prompt_ids)
        if num_tokens <= slice_blocks(table.block_size, len(media)) * table.block_size:
            return None
        prepared = PreparedPrompt(root)
        for _ in prepared.slices(array("I", command.prompt_ids), media, table, pack_token_ids):
            await asyncio.sleep(0)
        return prepared
