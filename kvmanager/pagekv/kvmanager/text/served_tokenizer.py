"""The tokenizer that a manager serves with: that of --tokenizer, or that of the executor's model."""

from __future__ import annotations

import asyncio

from pagekv.common.logs import Log
from pagekv.common.models import ModelNotFound, resolve_model
from pagekv.common.phases import phase
from pagekv.kvmanager.text.template_sandbox import ChatTemplateError
from pagekv.kvmanager.text.tokenizer import Tokenizer, TokenizerError

log = Log(__name__)


class ServedTokenizer:
    """Keeps the tokenizer in use, or none. Its processes end when another one is kept, or by `close`."""

    def __init__(self, named: Tokenizer | None, *, from_executor: bool) -> None:
        """`named`: the tokenizer of --tokenizer. `from_executor`: the flag names none, and the model decides."""
        self._named, self._from_executor = named, from_executor
        self.kept: Tokenizer | None = None
        # Kept here, because the event loop has only weak references to tasks.
        self._warming: asyncio.Task[None] | None = None

    async def of_model(self, model_id: str) -> Tokenizer | None:
        """The tokenizer for a model id, "" if the executor has no model. None, and a line in the log, without one."""
        if not self._from_executor:
            return self._named
        if not model_id:
            log.info("the executor has no model directory: serving token ids only; name a tokenizer with --tokenizer")
            return None
        try:
            with phase("loading the tokenizer"):
                return await asyncio.to_thread(load_tokenizer, model_id)
        except (ModelNotFound, TokenizerError) as error:
            log.warning("no tokenizer: serving token ids only; name one with --tokenizer", reason=error)
            return None

    def keep(self, tokenizer: Tokenizer | None) -> None:
        """Keeps this tokenizer from now on; the processes of the one before end."""
        former, self.kept = self.kept, tokenizer
        if former is tokenizer:
            return
        if self._warming is not None:
            # Cancelled first, because it would take the end of the process for a fault of the template.
            self._warming.cancel()
            self._warming = None
        if former is not None:
            former.close()
        if tokenizer is not None:
            self._warming = asyncio.create_task(_warm(tokenizer), name="chat template")

    def close(self) -> None:
        """Keeps none. Idempotent."""
        self.keep(None)


async def _warm(tokenizer: Tokenizer) -> None:
    """Compiles the chat template, if there is one, so that the first conversation need not wait for it."""
    if tokenizer.chat_template is None:
        return
    try:
        await tokenizer.chat_template.warm()
    except ChatTemplateError as error:
        log.warning("conversations will be refused: the chat template cannot be used", reason=error)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model directory, of "demo" or of a hub id. Raises ModelNotFound, TokenizerError."""
    tokenizer = Tokenizer.load(resolve_model(name, weights=False))
    log.info(
        "tokenizer loaded", tokenizer=name, vocabulary=tokenizer.vocab_size, chat=tokenizer.chat_template is not None
    )
    return tokenizer
