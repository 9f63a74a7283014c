"""Turns token ids into text as they arrive, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pagekv.kvmanager.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence: decode(prompt) + everything returned == decode(prompt + tokens). O(1) per token.

    Tokens that stand for raw bytes are decoded as UTF-8, and an unfinished character is held back. Other tokens are
    whole characters; their text depends at most on the token before them (for a leading space).
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        """`context` are the token ids before the output: the prompt."""
        self._tokenizer = tokenizer
        # Bytes of an unfinished character.
        self._held = b""
        self._previous = next((token_id for token_id in reversed(context) if tokenizer.has_text(token_id)), None)

    def add(self, token_id: int) -> str:
        """The text that is final once this token is known; may be empty. Special and unknown tokens have no text."""
        if not self._held and (whole := self._tokenizer.whole_texts.get(token_id)) is not None:
            self._previous = token_id
            return whole
        if not self._tokenizer.has_text(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if raw is None:
            # An unfinished character before a whole one can never be completed: flush gives it as U+FFFD.
            text = self.flush() + self._tokenizer.text_after(self._previous, token_id)
        else:
            # As codecs' incremental decoder does, but without its layers, because this runs for every token.
            held = self._held
            raw = held + raw
            text, used = codecs.utf_8_decode(raw, "replace", False)
            self._held = raw[used:]
            if not held and not self._held:
                self._tokenizer.whole_texts[token_id] = text
        self._previous = token_id
        return text

    def flush(self) -> str:
        """The text held back at the end: U+FFFD for an unfinished character, else nothing."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")
