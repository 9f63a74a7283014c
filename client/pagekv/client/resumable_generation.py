"""One generation as its caller sees it, over as many connections as needed. No I/O: the clients do that.

If the request has one sequence, its broken stream is resumed, not replayed: the next call is the same request with the
tokens received so far, which the server counts as output and does not send again. Sampling is a pure function of
(logits, seed, sequence index, position), so the stream continues with the same tokens as without the break.

Several sequences are replayed as a whole: for the same reason each brings the same tokens again, and the part that the
caller already has is left out. A beam search, whose results come at its end, is replayed, too.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from pagekv.client.errors import (
    AlreadyExists,
    ConnectionLost,
    DataLoss,
    DeadlineExceeded,
    Draining,
    Overloaded,
    PageKVError,
    ServerError,
    Unavailable,
)
from pagekv.client.generation_types import Chunk, Completion, GenerateOptions, PositionLogprobs, Prompt
from pagekv.client.outage import FIRST_PAUSE_S, Outage
from pagekv.client.settings import CallSettings, check_resume_timeout, check_timeout, check_whole
from pagekv.client.wire import flat, generate_request
from pagekv.v1 import inference_service_pb2 as pb

# Largest SamplingParams.n, as in the contract.
MOST_SEQUENCES = 64
# If a server asks for a longer delay than this, the caller gets the error.
LONGEST_RETRY_S = 60.0


@dataclass(slots=True)
class _Sequence:
    """The part of one sequence that the caller has, and the position of the current connection in it. A connection
    begins at the first token or, if the sequence `resumes`, after the last token of the connection before.
    """

    resumes: bool
    # Whether every token comes in a chunk before the completion, and whether it comes with log-probabilities.
    streamed: bool
    with_logprobs: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    # As reported by the first connection that brought tokens.
    cached_tokens: int = 0
    # 0 before the first message.
    prompt_tokens: int = 0
    # Position at which the current connection began, in tokens and characters, and the position that it has reached.
    first_token: int = 0
    first_char: int = 0
    next_token: int = 0
    next_char: int = 0
    ended: bool = False

    def interrupted(self) -> None:
        if self.resumes:
            self.first_token, self.first_char = len(self.token_ids), self.num_chars
        self.next_token, self.next_char = self.first_token, self.first_char

    def unseen_part(self, chunk: Chunk) -> Chunk | None:
        """The part of the chunk that the caller does not have yet, None if there is none. `cached_tokens` are those of
        the first call, because a resumed call also counts tokens of the answer. Raises ServerError if tokens differ
        from those received, DataLoss for a gap.
        """
        known = len(self.token_ids[self.next_token : self.next_token + len(chunk.token_ids)])
        self._check_count(chunk, self.next_token + len(chunk.token_ids), len(chunk.logprobs))
        self._check(chunk, chunk.token_ids if self.ended else chunk.token_ids[:known], self.next_token)
        if not self.token_ids:
            self.cached_tokens = chunk.cached_tokens
        new = replace(
            chunk,
            token_ids=chunk.token_ids[known:],
            logprobs=chunk.logprobs[known:],
            text=chunk.text[self.num_chars - self.next_char :],
            cached_tokens=self.cached_tokens,
        )
        self.next_token += len(chunk.token_ids)
        self.next_char += len(chunk.text)
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.texts.append(new.text)
        self.num_chars = max(self.num_chars, self.next_char)
        return new if new.token_ids or new.text else None

    def finish(self, end: Completion, num_logprobs: int) -> tuple[Completion, Chunk | None]:
        """The whole sequence, and its last chunk, with everything that did not come in chunks; no chunk if the sequence
        had ended before. The server's end had `num_logprobs` positions of log-probabilities; `end` has them only if
        they did not come in chunks.

        The end of a resumed call does not contain the tokens generated before, and the end of a replay that was aborted
        may be shorter than the tokens received before. Raises ServerError if tokens differ from those received,
        DataLoss unless the chunks and the end agree.
        """
        total, received = self.first_token + len(end.token_ids), len(self.token_ids)
        self._check_count(end, total, num_logprobs)
        if self.streamed and self.next_token != total:
            raise self._gap(end, f"ends with {total} tokens, {self.next_token} came with its chunks")
        self._check(end, end.token_ids if self.streamed or self.ended else (), self.first_token)
        if total < received and end.finish_reason != "abort":
            raise self._gap(end, f"ends with {total} tokens, {received} came before")
        whole, rest = end, end
        if self.streamed:
            text = "".join(self.texts)
            if text[self.first_char : self.next_char] != end.text:
                raise self._gap(end, "ends with another text than came with its chunks")
            whole = replace(
                end,
                text=text,
                token_ids=tuple(self.token_ids),
                completion_tokens=received,
                logprobs=tuple(self.logprobs),
                cached_tokens=self.cached_tokens if received else end.cached_tokens,
            )
            rest = replace(whole, text="", token_ids=(), logprobs=())
        else:
            self.token_ids = list(end.token_ids)
        if self.ended:
            return whole, None
        self.ended = True
        # A completion has every field of a chunk.
        return whole, Chunk(**{each.name: getattr(rest, each.name) for each in fields(Chunk)})

    def _check_count(self, part: Chunk | Completion, came: int, num_logprobs: int) -> None:
        """Raises DataLoss unless the number of tokens is the server's count, and the requested log-probabilities are
        there.
        """
        if part.completion_tokens != came:
            raise self._gap(part, f"has {part.completion_tokens} tokens by the server's count, {came} came")
        if self.with_logprobs and num_logprobs != len(part.token_ids):
            raise self._gap(part, f"has {num_logprobs} log-probabilities for {len(part.token_ids)} tokens")

    def _gap(self, part: Chunk | Completion, words: str) -> DataLoss:
        return DataLoss(f"the answer has a gap: sequence {part.index} {words}")

    def _check(self, part: Chunk | Completion, token_ids: tuple[int, ...], start: int) -> None:
        """Raises ServerError unless `part` has the same number of prompt tokens, and these are the tokens received from
        `start` on.
        """
        if self.prompt_tokens not in (0, part.prompt_tokens):
            raise ServerError(
                "FAILED_PRECONDITION",
                f"cannot resume: the prompt had {self.prompt_tokens} tokens and the server that came back makes it "
                f"{part.prompt_tokens}; is it another tokenizer?",
            )
        self.prompt_tokens = part.prompt_tokens
        if tuple(self.token_ids[start : start + len(token_ids)]) != token_ids:
            raise ServerError(
                "FAILED_PRECONDITION",
                "cannot resume: the server that came back generates other tokens than those received; does it compute "
                "in another precision, or by another version?",
            )


class ResumableGeneration:
    """States: streaming ⇄ interrupted (between `failed` and the next `request`) → done (every sequence complete)."""

    def __init__(
        self,
        prompt: Prompt,
        n: int,
        options: GenerateOptions,
        settings: CallSettings,
        *,
        only_complete: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidRequest and TypeError like `generate_request`, and InvalidRequest for time limits out of
        bounds.
        """
        check_whole("n", n, 1, MOST_SEQUENCES)
        n = int(n)  # NumPy's is one, too
        self._clock = clock
        resume_timeout, timeout = options.get("resume_timeout"), options.get("timeout")
        resume_timeout = settings.resume_timeout if resume_timeout is None else resume_timeout
        check_resume_timeout(resume_timeout)
        self._outage = Outage(resume_timeout, clock, logging.getLogger(__name__))
        check_timeout(timeout)
        # Only chunks show which tokens were received, so a generation that may be resumed must be streamed.
        only_complete = only_complete and (n > 1 or resume_timeout <= 0)
        self._request = generate_request(prompt, n, options, only_complete=only_complete)
        # Chosen here and not by the server, so that every connection of this generation has the same seed and id.
        sampling = self._request.sampling_params
        if not sampling.HasField("seed") and not sampling.beam_width:
            sampling.seed = secrets.randbits(63)
        if not self._request.request_id:
            self._request.request_id = f"req-{secrets.token_hex(12)}"
        self._deadline = None if timeout is None else clock() + timeout
        # By index. A single sequence is resumed; several are replayed, and each replay sends the received tokens again.
        streamed = not (only_complete or sampling.beam_width)
        asked = sampling.HasField("logprobs")
        self._sequences = [_Sequence(resumes=n == 1, streamed=streamed, with_logprobs=asked) for _ in range(n)]
        # Whether a message of the stream has come.
        self._begun = False
        # Fingerprint of the model that generated the tokens received.
        self._model_fingerprint = ""
        self._resumes = 0
        self._retries_left = settings.max_retries
        self.request_id = self._request.request_id
        self.completions: dict[int, Completion] = {}

    @property
    def done(self) -> bool:
        return len(self.completions) == len(self._sequences)

    def remaining_s(self) -> float | None:
        """Seconds left of the caller's timeout, None without one. Raises DeadlineExceeded when it has passed."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            outage = f": {self._words_of_loss()}, and was not back" if self._outage.under_way else ""
            raise DeadlineExceeded(
                f"the generation did not finish in time{outage}; allow more with --timeout (timeout= in Python)"
            )
        return left

    def request(self) -> pb.GenerateRequest:
        # Another model would continue with other words: with the fingerprint the server refuses to do so.
        self._request.model_fingerprint = self._model_fingerprint
        first = self._sequences[0]
        self._request.resumed_token_ids[:] = first.token_ids[: first.first_token]
        return self._request

    def take(self, response: pb.GenerateResponse) -> tuple[Chunk, ...]:
        """Takes a message of the stream and returns the chunks that the caller gets. The end of a sequence gives a
        chunk and an entry of `completions`; an event that this client does not know is ignored.

        Raises ServerError if a replay differs from the tokens received, DataLoss if messages are missing or the
        sequence was not requested.
        """
        self._outage.end()
        self._model_fingerprint = response.model_fingerprint or self._model_fingerprint
        self._begun = True
        event = response.WhichOneof("event")
        if event is None:
            return ()
        if event == "chunk":
            chunk = flat(Chunk, response.chunk, request_id=response.request_id)
            new = self._sequence(chunk.index).unseen_part(chunk)
        else:
            message, given = response.complete, dict[str, Any](request_id=response.request_id)
            sequence = self._sequence(message.index)
            if sequence.streamed:
                # The chunks had the log-probabilities; reading them again would cost the event loop 60 microseconds
                # each.
                given["logprobs"] = ()
            end = flat(Completion, message, **given)
            whole, new = sequence.finish(end, len(message.logprobs))
            # A sequence that ended before the connection broke ends again in the replay, and keeps its first end.
            self.completions.setdefault(end.index, replace(whole, resumes=self._resumes))
        return () if new is None else (new,)

    def _sequence(self, index: int) -> _Sequence:
        if index >= len(self._sequences):
            raise DataLoss(f"the server sent sequence {index} of {len(self._sequences)}")
        return self._sequences[index]

    def ended(self) -> None:
        """Called when the server has closed the stream without an error. Raises DataLoss unless every sequence is
        complete.
        """
        if not self.done:
            raise DataLoss("the stream ended before its sequences were complete")

    def failed(self, error: PageKVError) -> float:
        """Seconds to wait before the next call. Raises the error if there is to be none. This module's logger warns
        when an outage begins.
        """
        if self._is_refused(error):
            return self._retry_in(error)
        if not self._may_go_on(error):
            self._give_up(error)
        self._resumes += not self._outage.under_way
        for sequence in self._sequences:
            sequence.interrupted()
        pause = self._outage.pause_s(error, error.retry_delay_s if isinstance(error, (Draining, Overloaded)) else 0.0)
        if pause is None:
            self._give_up(error)
        remaining = self.remaining_s()
        return pause if remaining is None else min(pause, remaining)

    def _give_up(self, error: PageKVError) -> NoReturn:
        """Raises the error, with its class and attributes. If there is an outage, the message describes it."""
        if self._outage.under_way:
            is_gone = isinstance(error, Unavailable)
            why = f"did not come back within {self._outage.timeout_s:g} s" if is_gone else "the stream could not go on"
            error.args = (f"{self._words_of_loss()}, and {why}: {error}",)
        raise error

    def _words_of_loss(self) -> str:
        received = sum(len(sequence.token_ids) for sequence in self._sequences)
        return f"the connection was lost after {received} token{'s' * (received != 1)}"

    def _is_refused(self, error: PageKVError) -> bool:
        """Whether nothing has begun, and the server, if there is one, does not accept the request now."""
        if self._begun or self._outage.under_way or self._may_go_on(error):
            return False
        return isinstance(error, (Overloaded, Unavailable)) and not isinstance(error, ConnectionLost)

    def _retry_in(self, error: PageKVError) -> float:
        """Seconds to wait before a refused request is sent again. Raises the error if it must not be retried."""
        asked_for = max(getattr(error, "retry_delay_s", 0.0), FIRST_PAUSE_S)
        # Not sooner than asked, and with a random part, so that clients do not come all at once.
        pause = asked_for * (1 + random.random() / 4)
        remaining = self.remaining_s()
        if not self._retries_left or asked_for > LONGEST_RETRY_S or (remaining is not None and pause >= remaining):
            raise error
        self._retries_left -= 1
        return pause

    def _may_go_on(self, error: PageKVError) -> bool:
        if self._outage.timeout_s <= 0:
            return False
        # A manager that shuts down is followed by another one, which also serves calls that the first never accepted.
        if isinstance(error, (ConnectionLost, Draining)):
            return True
        # A first call that finds no server, or a server that refuses it, is retried, or the caller gets the error. In
        # the middle of a generation the same errors mean that the server is not back yet; ALREADY_EXISTS means that it
        # has not noticed the broken call with this request_id yet.
        return (self._begun or self._outage.under_way) and isinstance(error, (Unavailable, Overloaded, AlreadyExists))
