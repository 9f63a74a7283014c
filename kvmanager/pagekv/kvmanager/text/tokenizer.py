"""Text to token ids and back with the `tokenizers` library: the manager imports neither transformers nor torch."""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagekv.kvmanager.text.chat_template import ChatTemplate
from pagekv.kvmanager.text.library_errors import words_of
from pagekv.kvmanager.text.template_sandbox import ChatTemplateError
from pagekv.kvmanager.text.worker_process import JobRefused, WorkerProcess

TOKENIZER_FILE = "tokenizer.json"
# Seconds of CPU time for one long text, and bytes of address space for it and the tokenizer. Encoding needs some 350
# bytes for each token, so a text of 4 MB and a million tokens fits.
LONG_TEXT_CPU_S = 60.0
LONG_TEXT_MEMORY_BYTES = 1280 * 2**20
# Most long texts that may wait at once.
MAX_LONG_TEXTS = 32

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """No tokenizer can be loaded from a directory; the message says what to do."""


class TextRefused(Exception):
    """The library cannot encode a text or decode ids; the message has its words."""


class TooManyTokens(Exception):
    """A text has more tokens than the caller can use."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class Tokenizer:
    """A loaded tokenizer with its chat template, if any. Safe to use from threads, because only caches change."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None, directory: Path | None = None
    ) -> None:
        """`directory`: where its files are, for clients that load it themselves."""
        self._backend = backend
        self.directory = directory
        # tokenizer.json may have such settings from a training run, but a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        # Tokens that are never part of decoded text.
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = set(_decoder_kinds(_decoder_of(backend)))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes | None] = {}
        # Texts of tokens that do not depend on other tokens; filled by `Detokenizer`, for all sequences.
        self.whole_texts: dict[int, str] = {}
        self._worker = WorkerProcess(
            "tokenizer", self._setup, LONG_TEXT_CPU_S, LONG_TEXT_MEMORY_BYTES, max_waiting=MAX_LONG_TEXTS
        )

    def _setup(self) -> bytes:
        """Path or content of the file from which the worker process loads this tokenizer."""
        if self.directory is not None:
            return os.fsencode((self.directory / TOKENIZER_FILE).resolve())
        return str(self._backend.to_str()).encode()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json, and chat template and special tokens if there are any. Raises TokenizerError."""
        path = directory / TOKENIZER_FILE
        if not _is_file(path):
            raise TokenizerError(
                f"{directory} has no tokenizer.json: save the model's fast tokenizer there "
                "(AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY) writes one), or serve token ids only"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {words_of(error)}") from error
        settings = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        source = _chat_template_source(directory, settings)
        try:
            template = None if source is None else ChatTemplate(source, _special_tokens(settings))
        except ChatTemplateError as error:
            raise TokenizerError(f"{directory}: {error}") from error
        return cls(backend, template, directory)

    def encode(self, text: str, *, special_tokens: bool, limit: int) -> list[int]:
        """Token ids of `text`, with `special_tokens` those that the tokenizer puts around a text as well.

        May run in a thread, because it does not hold the interpreter lock. Raises TextRefused, and TooManyTokens beyond
        `limit` tokens.
        """
        try:
            # encode() would hold the interpreter lock; the batch form does not.
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0]
        except BaseException as error:
            raise TextRefused(words_of(error)) from error
        if len(encoding) > limit:
            raise TooManyTokens(len(encoding))
        return encoding.ids

    async def encode_long(self, text: str, *, special_tokens: bool, limit: int) -> array[int]:
        """As `encode`, in the worker process, one text after the other; uint32. Cancelling the call ends the encoding.
        Raises TextRefused, TooManyTokens, WorkerStopped, Overloaded, or Unavailable when closed.
        """
        answer = await self._run("encode", struct.pack("<?Q", special_tokens, limit) + text.encode())
        (num_tokens,) = struct.unpack_from("<Q", answer)
        if num_tokens > limit:
            raise TooManyTokens(num_tokens)
        return array("I", answer[struct.calcsize("<Q") :])

    async def decode_long(self, token_ids: array[int]) -> bytes:
        """As `decode`, in the worker process: UTF-8 of the text of uint32 ids. Raises as `encode_long` does."""
        return await self._run("decode", token_ids.tobytes())

    async def _run(self, job: str, body: bytes) -> bytes:
        try:
            return await self._worker.run(job, body)
        except JobRefused as error:
            raise TextRefused(str(error)) from error

    def close(self) -> None:
        """Ends the worker processes of long texts and of the chat template for good."""
        self._worker.close()
        if self.chat_template is not None:
            self.chat_template.close()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`. Special tokens and ids that the tokenizer does not know are left out. Raises
        TextRefused.
        """
        try:
            return self._backend.decode_batch([token_ids], skip_special_tokens=True)[0]
        except BaseException as error:
            raise TextRefused(words_of(error)) from error

    def has_text(self, token_id: int) -> bool:
        """Whether decoded text has the token: not if it is special, or if the tokenizer does not know it, as the ids
        with which a model fills its vocabulary up.
        """
        return token_id not in self.special_ids and self.token_bytes(token_id) != b""

    def token_bytes(self, token_id: int) -> bytes | None:
        """UTF-8 bytes of a token by itself, perhaps not whole characters; None if its text depends on its context. An
        unknown id has no bytes.
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._bytes_of(self._backend.id_to_token(token_id))
        return self._bytes[token_id]

    def _bytes_of(self, token: str | None) -> bytes | None:
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token is stored as plain text
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return None
        return None

    def text_after(self, previous: int | None, token_id: int) -> str:
        """Text that a token adds after `previous`. None: at the start of a text, which may drop a leading space."""
        if previous is None:
            return self.decode([token_id])
        return self.decode([previous, token_id])[len(self.decode([previous])) :]


def _decoder_of(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    """The decoder as tokenizer.json has it. It is serialised without the vocabulary, because writing and reading
    150,000 tokens takes as long as loading the tokenizer, and 50 MB.
    """
    if backend.decoder is None:
        return None
    alone = tokenizers.Tokenizer(tokenizers.models.BPE())
    alone.decoder = backend.decoder
    found: Mapping[str, Any] = json.loads(alone.to_str())["decoder"]
    return found


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> list[str]:
    """Types of a decoder in tokenizer.json and of the decoders that it contains."""
    if decoder is None:
        return []
    return [decoder["type"]] + [kind for part in decoder.get("decoders", ()) for kind in _decoder_kinds(part)]


def _byte_alphabet() -> dict[str, int]:
    """The alphabet of byte-level BPE, which writes every byte as one printable character: as itself if it is printable,
    else as a character from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _is_file(path: Path) -> bool:
    """Raises TokenizerError if that cannot be known, as in a directory without access."""
    try:
        return path.is_file()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _read_text(path: Path) -> str | None:
    """The text of a file in UTF-8, None if there is no such file. Raises TokenizerError."""
    if not _is_file(path):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    # JSON with thousands of nested levels raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _chat_template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's source, from a file of its own if there is one, else from tokenizer_config.json; of several named
    templates the default one.
    """
    source = _read_text(directory / "chat_template.jinja")
    if source is not None:
        return source
    found = _read_json(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(found, list):
        default = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = default[-1].get("template") if default else None
    return found if isinstance(found, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens by name; in the settings a token is a text or an object with `content`."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
