"""Arguments and results of generating: plain values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from pagekv.client.options import described

__all__ = [
    "CacheControls", "ChatMessage", "Chunk", "Completion", "FinishReason", "GenerateOptions", "MediaHash",
    "PositionLogprobs", "Prompt", "TokenLogprob",
]  # fmt: skip  # one name a line would fill a screen

# "unknown" stands for values that only later servers know.
FinishReason: TypeAlias = Literal["stop", "length", "abort", "unknown"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; `role` is "system", "user" or "assistant" for most chat templates."""

    role: str
    content: str


# Text, token ids, or a conversation (messages, or mappings with the keys role and content).
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class MediaHash:
    """Prompt positions [position, position + length) stand for a medium whose content has this digest."""

    position: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class CacheControls:
    """The namespace whose cached blocks a request shares, and whether it reads and writes the prefix cache.
    `media_hashes` raise InvalidRequest unless the model accepts media; no model does yet.
    """

    namespace: str = ""
    media_hashes: tuple[MediaHash, ...] = ()
    read: bool = True
    write: bool = True


@described
class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of every generating method. An option left out, or None, takes the default."""

    temperature: float | None
    """Softmax temperature, 0 to 100; 0 is greedy. Default 1."""
    top_p: float | None
    """Nucleus sampling, above 0 and up to 1. Default 1: off."""
    top_k: int | None
    """Sample only from the k most likely tokens, 1 to 4,294,967,295; 0 is off. Default 0."""
    min_p: float | None
    """Sample only from tokens whose probability is at least this share of the highest, 0 to 1; 0 is off. Default 0."""
    max_tokens: int | None
    """Most tokens to generate, from 1 to the room that context and pool leave. Default 16, for chat the rest of the
    context.
    """
    min_tokens: int | None
    """Tokens to generate before anything but max_tokens may end the sequence, 0 to max_tokens. Default 0."""
    seed: int | None
    """Seed of the random choices, 0 to 2 ** 64 - 1. Default: drawn by the client, so that a broken stream can continue
    with it. Beam search has no seed.
    """
    stop: str | Sequence[str] | None
    """One or more strings that end the text; the text stops before them. At most 16, each 1 to 256 characters."""
    stop_token_ids: Sequence[int] | None
    """Token ids that end the sequence besides the model's own: at most 64, each below the vocabulary size."""
    ignore_eos: bool | None
    """True: the model's end-of-sequence token does not end the sequence. Default False."""
    repetition_penalty: float | None
    """0.001 to 10; above 1, tokens of the prompt and the output become less likely. Default 1: off."""
    presence_penalty: float | None
    """-2 to 2. Default 0: off."""
    frequency_penalty: float | None
    """-2 to 2. Default 0: off."""
    logprobs: int | None
    """Return log-probabilities of the chosen token and of this many most likely tokens, 0 to 20. Default: none."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of single tokens, by token id: at most 1,024 entries, each -100 to 100."""
    beam_width: int | None
    """Beam search with this many hypotheses at once, 1 to 32; 0 is off. Default 0. The `n` best results are returned,
    best first, at the end of the search: each is one chunk. Sampling options must be left out, a temperature must be 0.
    """
    length_penalty: float | None
    """Beam search ranks results by logprob / tokens ** length_penalty, so values above 0 favour longer results; -10 to
    10. Default 1.
    """
    early_stopping: bool | None
    """True: beam search ends once beam_width hypotheses have ended, however likely the others may become. Default
    False.
    """
    cache: CacheControls | None
    """The namespace whose cached blocks the request shares, and whether it reads and writes the cache. Default: it does
    both.
    """
    adapter: str | None
    """The adapter to answer with, up to 256 bytes. Raises NotFound unless the model has it; no model has adapters yet.
    Default: none.
    """
    priority: int | None
    """Lower runs earlier, -100 to 100. Default 0."""
    request_id: str | None
    """Unique among the live requests of the caller's tenant, 1 to 128 characters of [A-Za-z0-9._:-]. Default: drawn by
    the client, so that a broken stream can continue with it.
    """
    timeout: float | None
    """Seconds for the whole generation, including retries and resumed parts, above 0 and up to 1,000,000. None: no
    limit, the default.
    """
    resume_timeout: float | None
    """Seconds to keep trying to resume after the connection was lost, 0 to 1,000,000; 0: never resume. Default: the
    client's.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of a token under the raw logits."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log-probabilities at one generated position: of the chosen token, and of the most likely tokens, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one sequence. `token_ids`, `text` and `logprobs` are deltas, the counts are cumulative. The last
    chunk of each sequence has a `finish_reason`; usually it has no new tokens, because only the message after the last
    tokens says that the sequence has ended. With beam search the last chunk has the whole sequence.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    """Never splits a character; empty while the text may still turn out to be a stop string."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Why the sequence has ended; None while it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sequence."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens served from the prefix cache when the sequence was first admitted."""
    stop_token_id: int | None = None
    """The token that ended the sequence, if one did: finish_reason is then "stop"."""
    stop_string: str | None = None
    """The stop string that ended the sequence, if one did."""
    preemptions: int = 0
    """Times that the server preempted the sequence."""
    resumes: int = 0
    """Times that the stream broke and was resumed."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    cumulative_logprob: float | None = None
    """Sum of the natural-log probabilities of token_ids; only with beam search."""
