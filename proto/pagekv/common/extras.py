"""The modules that each extra of the package installs. Without extras the package is only the client; a server that is
started without its extra names the missing modules and the command that installs them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

# By extra: the modules without which its process does not start, in the order of their distributions in pyproject.toml.
MODULES = {
    "manager": (
        "grpc_reflection",
        "tokenizers",
        "jinja2",
        "huggingface_hub",
        "msgpack",
        "numpy",
        "cryptography",
        "jwt",
    ),
    "executor": ("grpc_reflection", "torch", "transformers", "safetensors", "numpy", "cryptography"),
}


def missing_modules(*extras: str) -> list[str]:
    """Modules of these extras that are not installed; found without importing any."""
    modules = dict.fromkeys(name for extra in extras for name in MODULES[extra])
    return [name for name in modules if find_spec(name) is None]


def missing_words(extra_to_install: str, missing: list[str]) -> str:
    """A sentence without a full stop: the missing modules, and the command that installs them."""
    return f"not installed: {', '.join(missing)}; pip install 'pagekv[{extra_to_install}]' brings all it needs"


def refuse_without(prog: str, extra: str) -> None:
    """Ends the process with status 1 and one line on standard error if a module of `extra` is missing."""
    if missing := missing_modules(extra):
        sys.exit(f"{prog}: {missing_words(extra, missing)}")
