"""The script that pins images by digest, and that SECURITY.md says what is not pinned."""

from __future__ import annotations

import hashlib
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "pin_images.py"))
MANIFEST = b'{"manifests": []}'
PIN = f"sha256:{'0' * 64}"


@pytest.fixture
def hub() -> Iterator[tuple[str, list[tuple[str, str | None, str | None]]]]:
    """A registry and its tokens; what was asked for with which authorization and formats."""
    asked: list[tuple[str, str | None, str | None]] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"], self.headers["Accept"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"token": "t"}' if self.path.startswith("/token") else MANIFEST)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("image", "path"),
    [
        ("python:3.11-slim", "library/python/manifests/3.11-slim"),
        ("prom/prometheus:v3", "prom/prometheus/manifests/v3"),
    ],
)
def test_a_digest_is_that_of_the_index_the_registry_has(
    hub: tuple[str, list[tuple[str, str | None, str | None]]], image: str, path: str
) -> None:
    url, asked = hub
    found = SCRIPT["digest"](image, url, f"{url}/token?scope={{}}")
    assert found == f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
    (token_path, _, _), (manifest_path, authorization, formats) = asked
    assert token_path == f"/token?scope={path.partition('/manifests')[0]}"
    assert (manifest_path, authorization) == (f"/v2/{path}", "Bearer t")
    assert formats is not None
    assert "image.index.v1+json" in formats


def test_every_image_of_others_is_pinned_and_pinned_again() -> None:
    text = (
        "# syntax=docker/dockerfile:1\nARG PYTHON_IMAGE=python:3.11-slim\nFROM ${PYTHON_IMAGE} AS build\n"
        "    PYTHON_IMAGE: ${PYTHON_IMAGE:-python:3.11-slim}\n"
        "    image: pagekv-executor\n    image: grafana/grafana:12.1.0\n"
    )
    images = ["docker/dockerfile:1", "python:3.11-slim", "python:3.11-slim", "grafana/grafana:12.1.0"]
    assert SCRIPT["unpinned"](text) == images
    once = SCRIPT["pinned"](text, lambda image: PIN)
    assert SCRIPT["unpinned"](once) == []
    assert once == text.replace("dockerfile:1", f"dockerfile:1@{PIN}").replace("-slim", f"-slim@{PIN}").replace(
        "12.1.0", f"12.1.0@{PIN}"
    )
    other = PIN.replace("0", "1")
    assert SCRIPT["pinned"](once, lambda image: other) == once.replace(PIN, other)


def test_every_image_of_the_files_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"](["--check"]) == 0
    assert "every image is pinned" in capsys.readouterr().out


def test_a_misspelt_argument_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"](["--chek"]) == 2
    assert "usage:" in capsys.readouterr().err


def test_no_image_is_overlooked() -> None:
    """Everything that a Dockerfile or a compose file gets from a registry is in the script's sight."""
    pinned = [SCRIPT["pinned"]((ROOT / name).read_text(), lambda image: PIN) for name in SCRIPT["FILES"]]
    lines = [line.strip() for text in pinned for line in text.splitlines()]
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"${PYTHON_IMAGE}"}
    named = [line for line in lines if line.startswith(("image: ", "ARG PYTHON_IMAGE", "PYTHON_IMAGE: ", "# syntax="))]
    ours = {"image: pagekv-kvmanager", "image: pagekv-executor", "image: pagekv-gateway"}
    assert len(named) > 8
    assert [line for line in named if PIN not in line and line not in ours] == []
