"""Nothing of the product unpickles or evaluates: what comes over a port, or lies in a folder, is data, not code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto/pagekv", "kvmanager/pagekv", "executor/pagekv", "kernels/pagekv", "client/pagekv")
# Modules whose readers run what they read.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
# Calls that unpickle, by the ends of their names: numpy's and torch's, queues and connections of multiprocessing, whose
# objects are pickled, and ZeroMQ's.
CALLS = ("torch.load", "np.load", "numpy.load", "read_pickle", "recv_pyobj", "unpickle", "torch.hub.load")
# Calls that run a text.
RUNNING = {"eval", "exec"}
OBJECTS = ("Pipe", "Queue", "SimpleQueue", "JoinableQueue", "Manager", "Listener", "Client")


def faults(source: str) -> Iterator[str]:
    """Lines of a module that may unpickle, or run what they read."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            names += [alias.name for alias in node.names if (node.module or "").startswith("multiprocessing")]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            pickled = any(each.arg == "allow_pickle" for each in node.keywords)
            made = called.startswith(("multiprocessing.", "mp.")) and called.endswith(OBJECTS)
            # Without a word transformers asks at the terminal whether to run a model's own code.
            trust = [ast.unparse(each.value) for each in node.keywords if each.arg == "trust_remote_code"]
            trusted = trust != ["False"] if called.endswith(".from_pretrained") else bool(trust)
            if called.endswith(CALLS) or called in RUNNING or pickled or made or trusted:
                yield f"line {node.lineno}: {called}"
            continue
        yield from (f"import of {name}" for name in names if name.partition(".")[0] in MODULES or name in OBJECTS)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_unpickles(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in faults(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import numpy as np\nnp.load(path)",
        "archive.get(x, allow_pickle=True)",
        "socket.recv_pyobj()",
        "from multiprocessing import Queue",
        "import multiprocessing\nmultiprocessing.Pipe()",
        "eval(text)",
        "exec(text)",
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trusted)",
    ],
)
def test_what_unpickles_is_found(source: str) -> None:
    assert len([*faults(source)]) == 1


def test_what_does_not_is_not() -> None:
    assert not [*faults("import json, queue, numpy as np\njson.load(file)\nqueue.Queue()\nnp.frombuffer(b'')")]
    assert not [*faults("AutoConfig.from_pretrained(path, trust_remote_code=False)\nself.eval(x)")]
