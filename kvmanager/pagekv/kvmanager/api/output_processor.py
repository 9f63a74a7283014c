"""Turns the tokens of one sequence into client-visible text, cut before a stop string or stop token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand
from pagekv.kvmanager.request.logprobs import PackedLogprobs, TokenLogprobs
from pagekv.kvmanager.request.stream import SequenceDelta
from pagekv.kvmanager.text.detokenizer import Detokenizer
from pagekv.kvmanager.text.stop_strings import StopMatcher, StopStrings
from pagekv.kvmanager.text.tokenizer import Tokenizer

# Resumed tokens that are processed at once. A token takes 1 to 10 microseconds the first time that it is seen.
SLICE_TOKENS = 256
# Tokens before the output among which the last one with text is searched; a leading space of the output depends on it.
CONTEXT_TOKENS = 1024


@dataclass(slots=True)
class TextDelta:
    """A SequenceDelta as the client gets it: with text, and cut after the token that completed a stop string."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


class OutputProcessor:
    """Turns the tokens of one sequence into text and keeps its output. Without a tokenizer the text stays empty."""

    def __init__(self, command: GenerateCommand, stops: StopStrings, tokenizer: Tokenizer | None) -> None:
        """`resume` has to be exhausted before any other method is called."""
        num_prompt = len(command.prompt_ids) - command.resumed_tokens
        self._resumed = command.prompt_ids[num_prompt:]
        context = command.prompt_ids[max(0, num_prompt - CONTEXT_TOKENS) : num_prompt]
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, context)
        self._matcher = StopMatcher(stops)
        self._sampling = command.sampling
        # The stop string, or the stop token, with which the resumed tokens end.
        self._resumed_match: str | None = None
        self._resumed_stop: int | None = None
        # Tokens generated, resumed ones included.
        self.num_tokens = 0
        # The whole output so far, without resumed tokens; it goes into GenerateComplete.
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs = PackedLogprobs()

    def resume(self, eos_token_ids: Collection[int]) -> Iterator[None]:
        """Processes resumed tokens and yields after every SLICE_TOKENS of them. Text that is held back at their end
        comes with the first new tokens. `eos_token_ids`: those of the model. Raises InvalidRequest if a stop string
        ends the output before the last of them.
        """
        num_text = len(self._resumed)
        # The executor samples no end among the first min_tokens; a caller may resume with one as the last of them.
        if num_text and num_text >= self._sampling.min_tokens:
            last = self._resumed[-1]
            if last in self._sampling.end_ids(eos_token_ids):
                # A stop token has no text, so it completes no stop string.
                self._resumed_stop = last
                num_text -= 1
        if self._detokenizer is None:
            num_text = 0
        for position, token_id in enumerate(islice(self._resumed, num_text), start=1):
            _, match = self._add(token_id)
            if match is not None and position < len(self._resumed):
                words = f"must be the last of them, since stop string {match!r} ends the output there"
                raise InvalidRequest(f"resumed_token_ids[{position - 1}]", words)
            self._resumed_match = match
            if position % SLICE_TOKENS == 0:
                yield
        self.num_tokens = len(self._resumed)

    def end_of_resumed(self) -> TextDelta | None:
        """The end to report at once if the resumed tokens are a finished output already; None: generation continues.

        This happens if a stream broke between its last token and its end. The message with the last token already had
        the last text.
        """
        if not self._resumed:
            return None
        if self._resumed_match is not None:
            return TextDelta(finish=FinishReason.STOP, stop_string=self._resumed_match)
        if self._resumed_stop is not None:
            return TextDelta(finish=FinishReason.STOP, stop_token_id=self._resumed_stop)
        if self.num_tokens >= self._sampling.max_tokens:
            return TextDelta(finish=FinishReason.LENGTH)
        return None

    def take(self, delta: SequenceDelta) -> TextDelta:
        """The next delta as the client gets it. Must not be called again after a result with `finish` set.

        If the result has a `finish` and the engine's delta has none, a stop string was found, and the caller has to end
        the sequence in the engine.
        """
        token_ids = delta.token_ids
        out = TextDelta(token_ids, "", delta.logprobs, delta.finish, delta.stop_token_id)
        for position, token_id in enumerate(token_ids, start=1):
            if delta.stop_token_id is not None and position == len(token_ids):
                self.num_tokens += 1  # the stop token is reported and has no text
                break
            text, stop_string = self._add(token_id)
            out.text += text
            if stop_string is not None:
                out.token_ids, out.logprobs = token_ids[:position], delta.logprobs[:position]
                out.finish, out.stop_token_id, out.stop_string = FinishReason.STOP, None, stop_string
                break
        if out.finish is not None and out.stop_string is None:
            out.text += self._flush()
        self.token_ids += out.token_ids
        self.texts.append(out.text)
        if out.logprobs:
            self.logprobs.extend(out.logprobs)
        return out

    def _add(self, token_id: int) -> tuple[str, str | None]:
        self.num_tokens += 1
        if self._detokenizer is None:
            return "", None
        # As a stop token may, which the executor bans while there are fewer than min_tokens.
        may_stop = self.num_tokens > self._sampling.min_tokens
        return self._matcher.feed(self._detokenizer.add(token_id), may_stop)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text, _ = self._matcher.feed(self._detokenizer.flush(), may_stop=False)
        return text + self._matcher.flush()
