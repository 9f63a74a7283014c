"""The attached model and its tokenizer, which services need to take a request, or the reason why there is none yet."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """A model that requests can be read for."""

    model: EngineInfo
    tokenizer: Tokenizer | None


class ServedModel:
    """Shared by the services of one manager. States: starting → open ⇄ closed while the model changes."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._tokenizer: Tokenizer | None = None
        self._fingerprint: str | None = None

    def open(self, fingerprint: str, tokenizer: Tokenizer | None) -> None:
        """Opens for requests to the model of this fingerprint, read with `tokenizer`; None: token ids only."""
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer

    def served(self) -> Served:
        """The model and its tokenizer. Raises Unavailable until both are known."""
        model = self._engine.model
        if model is None:
            raise self._engine.not_attached()
        if model.model_fingerprint != self._fingerprint:
            raise Unavailable("the tokenizer is being loaded")
        return Served(model, self._tokenizer)
