"""Beam search over a backend without a manager, and transformers' own."""

from __future__ import annotations

import math
from typing import Any

import torch
from support.executor.cpu_driver import Driver

from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling, Scheduled, SequenceState
from pagekv.kvmanager.scheduling.beam_search import BeamSearch, Candidates


def beam_reference(
    model: Any, prompt: list[int], width: int, results: int, new: int, *, length_penalty: float, end_ids: list[int]
) -> list[list[int]]:
    """Output tokens of transformers' results, best first, without the filling behind the end token."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=results,
            length_penalty=length_penalty,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=end_ids,
        )
    rows = out[:, len(prompt) :].tolist()
    return [row[: next((at for at, t in enumerate(row) if t in end_ids), new) + 1] for row in rows]


class BeamDriver(Driver):
    """Forks beams as a manager would: full blocks are shared, the partial one is copied, what nobody holds is NaN."""

    def search(self, prompt: list[int], search: BeamSearch) -> None:
        sampling = Sampling(logprobs=search.num_candidates)
        states = [self.sequence(prompt, sampling=sampling)]
        while not search.done:
            continuing = search.advance(self._candidates(states))
            children = [self._fork(states[parent], token_id) for parent, token_id, _ in continuing]
            held = {block for child in children for block in child.block_table}
            dropped = {block for state in states for block in state.block_table} - held
            self.backend.cache.device[list(dropped)] = math.nan
            self.free[:0] = dropped
            self.backend.finish(states)
            states = children

    def _candidates(self, states: list[SequenceState]) -> list[Candidates]:
        """Computes every known token of each state, in one step."""
        scheduled = []
        for state in states:
            while len(state.block_table) * self.block_size < len(state.token_ids):
                state.block_table.append(self.free.pop())
            scheduled.append(Scheduled(state, state.computed_tokens, len(state.token_ids) - state.computed_tokens))
        sampled = self.backend.launch(scheduled).collect()
        for state in states:
            state.computed_tokens = len(state.token_ids)
        return [sampled[state.seq_id].top for state in states]

    def _fork(self, parent: SequenceState, token_id: int) -> SequenceState:
        child = self.sequence([*parent.token_ids, token_id], parent.num_prompt_tokens, parent.sampling)
        full = parent.computed_tokens // self.block_size
        child.block_table = parent.block_table[:full]
        child.computed_tokens = parent.computed_tokens
        for source in parent.block_table[full:]:
            copy = self.free.pop()
            self.backend.copy_blocks(BlockCopies(CopyDirection.COPY, [source], [copy]))
            child.block_table.append(copy)
        return child
