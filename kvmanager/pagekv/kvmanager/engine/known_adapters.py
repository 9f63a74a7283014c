"""Which adapters a namespace was used with lately: where ExplainPrefix looks for a prefix cached under another one."""

from __future__ import annotations

from collections import OrderedDict

# Pairs of namespace and adapter that are remembered, and adapters of one namespace that are looked into.
MAX_KNOWN = 4096
MAX_OTHERS = 16


class KnownAdapters:
    """The latest pairs, in bounded memory. One namespace's adapters are never told to another."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, namespace: str, adapter_id: str) -> None:
        """A request uses this adapter, "" for none."""
        pair = (namespace, adapter_id)
        self._pairs[pair] = None
        self._pairs.move_to_end(pair)
        if len(self._pairs) > MAX_KNOWN:
            self._pairs.popitem(last=False)

    def others(self, namespace: str, adapter_id: str) -> list[str]:
        """Other adapters of the namespace, latest first."""
        found = [known for space, known in reversed(self._pairs) if space == namespace and known != adapter_id]
        return found[:MAX_OTHERS]
