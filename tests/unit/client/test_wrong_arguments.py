"""Arguments of a wrong type, to every public method and option of both clients: InvalidRequest names the argument, what
it takes and what was given, and nothing is sent. An argument that a method does not have is Python's own TypeError.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest

from pagekv.client import (
    AsyncPageKVClient,
    CacheControls,
    CallOptions,
    GenerateOptions,
    InvalidRequest,
    MediaHash,
    PageKVClient,
    WatchOptions,
)

NO_TEXT = [3, None, True, b"x", ["x"], object()]
NO_NUMBER = ["x", None, True, b"x", [1], object(), 10**400]
NO_WHOLE_NUMBER = [*NO_NUMBER, 1.5, -(2**64), 2**64]
NO_IDS = [3, None, True, b"x", object(), {1: 2}, "x", ["x"], [1.5], [None], [[1]], [-1], [2**32]]
# Callers pass anything.
Controls: Any = CacheControls
Media: Any = MediaHash
NO_CACHE = [
    "x", 3, True, {"namespace": "x"}, Controls(namespace=3), Controls(namespace=None), Controls(read="x"),
    Controls(write=None), Controls(media_hashes=3), Controls(media_hashes=("x",)),
    Controls(media_hashes=(Media(0, 4, 5),)), Controls(media_hashes=(Media("0", 4, "h"),)),
]  # fmt: skip  # several a line
MESSAGE = {"role": "user", "content": "x"}
# By annotation; an argument of another kind has to be added here.
WRONG: dict[str, list[Any]] = {
    "str": NO_TEXT,
    "str | None": [*NO_TEXT, "", "a\ud800:1"],
    "bool": ["x", 0, 1, None, 1.5, [True], object()],
    "int": NO_WHOLE_NUMBER,
    "int | None": NO_WHOLE_NUMBER,
    "float": NO_NUMBER,
    "float | None": NO_NUMBER,
    "Prompt": [
        *(ids for ids in NO_IDS if ids != "x"),
        [], MESSAGE, [{"role": "user"}], [{**MESSAGE, "content": 3}], [MESSAGE, 3], {3, 1}, numpy.array(3),
    ],
    "Sequence[int]": NO_IDS,
    "str | Sequence[str]": [3, True, b"x", {"x": 1}, [3], [b"x"], [None], object()],
    "Mapping[int, float]": [3, "x", True, b"x", [1], {"x": 1.0}, {1: "x"}, {1: None}, object()],
    "CacheControls": NO_CACHE,
    "CacheControls | None": NO_CACHE,
    "BlockState | None": ["x", 3, True, b"free", ["free"], object()],
    "Metadata": [3, None, "x", {"a": "b"}, ["ab"], [("a",)], [("a", 3)], [(3, "a")], [([], "a")]],
    "FilePath | None": [*NO_TEXT, ""],
    "grpc.ChannelCredentials | None": ["x", 3, object()],
    "Any": ["x", 3, object()],
}  # fmt: skip  # several a line
REQUIRED: dict[str, Any] = {
    "prompt": "x",
    "lease_seconds": 60,
    "pin_id": "p",
    "request_id": "r",
    "token_ids": [1],
    "n": 2,
}
METHODS = sorted(
    name for name in dir(PageKVClient) if not name.startswith("_") and callable(getattr(PageKVClient, name))
)
OPTIONS = {f"Unpack[{each.__name__}]": each for each in (CallOptions, GenerateOptions, WatchOptions)}
# Of the connection itself.
NOT_CALLS = {"close", "with_options"}


def annotations_of(options: Any) -> dict[str, str]:
    return {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}


def arguments_of(function: Any) -> Iterator[tuple[str, str, bool]]:
    """Name, annotation, and whether None leaves the argument out."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name != "self":
            yield name, parameter.annotation, "None" in parameter.annotation or parameter.default is None
        elif name != "self":
            options = OPTIONS[parameter.annotation]
            for option, annotation in annotations_of(options).items():
                # None leaves each of GenerateOptions out; an empty text does not stand for it.
                wrong_as = annotation.removesuffix(" | None") if options is GenerateOptions else annotation
                yield option, wrong_as, "None" in annotation


def escapes(call: Callable[..., Any], name: str, annotation: str, optional: bool) -> Iterator[str]:
    """The wrong values of an argument that are not refused as they should be."""
    for wrong in WRONG[annotation]:
        if wrong is None and optional:
            continue
        try:
            call(**{name: wrong})
        except InvalidRequest as error:
            says = re.search(r"must .*\b(is|has)\b", error.description, re.DOTALL)
            if name not in re.split(r"\W", error.field) or not says:
                yield f"{name}={wrong!r:.40}: {error}"
        except Exception as error:
            yield f"{name}={wrong!r:.40}: {error!r}"
        else:
            yield f"{name}={wrong!r:.40} was taken"


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NOT_CALLS])
def test_a_wrong_argument_of_a_call_is_refused_by_name(client: PageKVClient, method: str) -> None:
    """The server that the client talks to fails on every call that comes."""
    function = getattr(PageKVClient, method)
    parameters = inspect.signature(function).parameters.values()
    needed = {
        each.name: REQUIRED[each.name]
        for each in parameters
        if each.default is each.empty and each.kind < each.VAR_POSITIONAL and each.name != "self"
    }

    def call(**wrong: Any) -> None:
        ids = wrong.pop("request_ids", None)
        found: Any = client.abort("r", ids) if method == "abort" else getattr(client, method)(**{**needed, **wrong})
        # A list of pages asks for the first one here.
        next(found)

    found = [escape for argument in arguments_of(function) for escape in escapes(call, *argument)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("cls", [PageKVClient, AsyncPageKVClient])
def test_a_wrong_argument_of_a_client_is_refused_by_name(cls: Any) -> None:
    found = [escape for argument in arguments_of(cls.__init__) for escape in escapes(cls, *argument)]
    assert not found, "\n".join(found)


def test_a_wrong_option_of_a_copy_is_refused_by_name(client: PageKVClient) -> None:
    options = annotations_of(CallOptions).items()
    found = [escape for name, kind in options for escape in escapes(client.with_options, name, kind, "None" in kind)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("size", [0, -1, 4097])
def test_a_page_out_of_bounds_is_refused_alike_by_every_call(client: PageKVClient, size: int) -> None:
    for call in (client.list_blocks, client.list_requests, partial(client.explain_prefix, "x")):
        with pytest.raises(InvalidRequest, match=f"^page_size: must be a whole number from 1 to 4096, is {size}$"):
            call(page_size=size)


def test_no_time_at_all_is_refused_alike_by_every_call(client: PageKVClient) -> None:
    generating = (client.generate, client.stream, partial(client.generate_n, n=2))
    for call in (*(partial(call, "x") for call in generating), client.with_options, PageKVClient, AsyncPageKVClient):
        with pytest.raises(InvalidRequest, match=r"^timeout: must be above 0 and up to 1,000,000 seconds, .* is 0$"):
            call(timeout=0)


def test_an_argument_that_there_is_none_of_is_a_type_error(client: PageKVClient) -> None:
    with pytest.raises(TypeError, match=r"stats\(\).*'page_size'"):
        client.stats(page_size=3)  # type: ignore[call-arg]  # the mistake under test
