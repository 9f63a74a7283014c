"""Client library and command line of PageKV: `PageKVClient`, its asyncio twin, their types and errors.

with PageKVClient("127.0.0.1:50051") as client:
    print(client.generate("In the beginning", max_tokens=40).text)
    with client.stream([{"role": "user", "content": "Hello"}], temperature=0.7) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(stream.completion.finish_reason, stream.completion.cached_tokens)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagekv.common.version import pagekv_version

_MODULES = ("aio", "client", "errors", "generation_types", "settings", "table_replica", "types")

# ruff: noqa: F403  # each module says in __all__ what it gives
if TYPE_CHECKING:
    from pagekv.client.aio import *
    from pagekv.client.client import *
    from pagekv.client.errors import *
    from pagekv.client.generation_types import *
    from pagekv.client.settings import *
    from pagekv.client.table_replica import *
    from pagekv.client.types import *

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """Loads a name when it is first used. Loading imports gRPC, which reads GRPC_VERBOSITY only while it is
        imported; `pagekv.client.cli.main`, whose import begins with this module, sets the variable before that.
        """
        if name == "__version__":
            return pagekv_version()
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        loaded = [import_module(f"{__name__}.{module}") for module in _MODULES]
        if name == "__all__":
            return sorted(found for module in loaded for found in module.__all__)
        for module in loaded:
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, "__all__", "__version__", *__getattr__("__all__")})
