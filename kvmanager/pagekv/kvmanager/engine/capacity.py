"""Checks requests against the pool: the blocks that they may come to need, and the longest sequence that it holds."""

from __future__ import annotations

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.request.command import GenerateCommand


def blocks_needed(num_tokens: int, block_size: int, beam_width: int) -> int:
    """Blocks that a sequence of `num_tokens` tokens, prompt and output, holds when its last token is sampled; that
    token is never computed and needs no slot. For beam search: the blocks of all beams if they share none.
    """
    return max(1, beam_width) * -(-(num_tokens - 1) // block_size)


def longest_sequence(model: EngineInfo, beam_width: int) -> int:
    """Tokens, prompt and output, that a sequence may have: as many as the context allows and the pool holds."""
    held = model.num_device_blocks // max(1, beam_width) * model.block_size + 1
    return min(model.max_model_len, held)


def total_tokens(command: GenerateCommand) -> int:
    """Tokens, prompt and output, that a sequence of this request may come to have."""
    return len(command.prompt_ids) - command.resumed_tokens + command.sampling.max_tokens


def check_prompt_fits(field: str, num_prompt: int, beam_width: int, model: EngineInfo) -> None:
    """Raises InvalidRequest if the prompt in `field` leaves no room for an output token in the context or in the pool.
    If the pool is too small, the message names needed and available blocks.
    """
    most = longest_sequence(model, beam_width) - 1
    if num_prompt > most:
        needed = blocks_needed(num_prompt + 1, model.block_size, beam_width)
        why = _limit(num_prompt, needed, beam_width, model)
        raise InvalidRequest(field, f"has {num_prompt} tokens, must have from 1 to {most}: {why}")


def check_output_fits(num_prompt: int, max_tokens: int, beam_width: int, model: EngineInfo) -> None:
    """Raises InvalidRequest if a prompt that has passed `check_prompt_fits` leaves too little room for its output."""
    most = longest_sequence(model, beam_width) - num_prompt
    if max_tokens > most:
        total = num_prompt + max_tokens
        why = _limit(total, blocks_needed(total, model.block_size, beam_width), beam_width, model)
        raise InvalidRequest("sampling_params.max_tokens", f"must be from 1 to {most}, got {max_tokens}: {why}")


def _limit(num_tokens: int, needed: int, beam_width: int, model: EngineInfo) -> str:
    if needed <= model.num_device_blocks:
        return f"the context has {model.max_model_len} tokens, prompt and output"
    beams = f" for {beam_width} beams" if beam_width else ""
    return f"{num_tokens} tokens{beams} need {needed} blocks, the pool has {model.num_device_blocks}"
