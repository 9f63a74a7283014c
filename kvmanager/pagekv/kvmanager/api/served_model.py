"""The attached model and its tokenizer, which services need to read a request, or the error that says why not yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.access.caller import tenant_of_call
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.tenants.asking import Asking
from pagekv.kvmanager.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """Everything that is needed to read a request: model, tokenizer and the caller's tenant."""

    model: EngineInfo
    tokenizer: Tokenizer | None
    # The tenant that the call is for.
    asking: Asking = field(default_factory=Asking)


class ServedModel:
    """Shared by the services of one manager. States: starting → open ⇄ closed while the model changes."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._tokenizer: Tokenizer | None = None
        self._fingerprint: str | None = None

    def open(self, fingerprint: str, tokenizer: Tokenizer | None) -> None:
        """Accepts requests to the model of this fingerprint. `tokenizer` reads them; None: token ids only."""
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer

    def served(self) -> Served:
        """The model and its tokenizer, for the present call. Raises Unavailable until both are known, and
        PermissionDenied if the call's tenant is not known.
        """
        asking = self.asking()
        model = self._engine.model
        if model is None:
            raise self._engine.not_attached()
        if model.model_fingerprint != self._fingerprint:
            raise Unavailable("the tokenizer is being loaded")
        return Served(model, self._tokenizer, asking)

    def asking(self) -> Asking:
        """The tenant of the present call. Raises PermissionDenied if it is not known."""
        accounts, name = self._engine.accounts, tenant_of_call()
        return Asking(accounts.tenant(name), accounts.of(name), accounts.file.namespaces)
