"""Pins the images that Dockerfiles and compose files name to the digests that their registry has for their tags now:
`make pin-images`, on a machine that reaches Docker Hub. `--check` lists those without a digest and ends with status 1.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("kvmanager/Dockerfile", "executor/Dockerfile", "compose.yaml", "compose.gpu.yaml")
# Images of others; those that are built here have no tag.
_IMAGE = re.compile(r"(PYTHON_IMAGE=|PYTHON_IMAGE:-|image: |# syntax=)([\w./-]+:[\w.-]+)(@sha256:[0-9a-f]{64})?")
REGISTRY = "https://registry-1.docker.io"
TOKENS = "https://auth.docker.io/token?service=registry.docker.io&scope=repository:{}:pull"
# An index of all architectures, in the two formats that there are.
_INDEX = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
_TIMEOUT_S = 30.0


def digest(image: str, registry: str = REGISTRY, tokens: str = TOKENS) -> str:
    """SHA-256 of the index that the registry has for an image's tag, computed from what it answers. Raises OSError."""
    repository, _, tag = image.rpartition(":")
    repository = repository if "/" in repository else f"library/{repository}"
    with urllib.request.urlopen(tokens.format(repository), timeout=_TIMEOUT_S) as answer:
        token = json.load(answer)["token"]
    headers = {"Authorization": f"Bearer {token}", "Accept": _INDEX}
    request = urllib.request.Request(f"{registry}/v2/{repository}/manifests/{tag}", headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return f"sha256:{hashlib.sha256(answer.read()).hexdigest()}"


def unpinned(text: str) -> list[str]:
    """Images of a file that have a tag and no digest."""
    return [image for _, image, pin in _IMAGE.findall(text) if not pin]


def pinned(text: str, find: Callable[[str], str]) -> str:
    """The file with the digest that `find` gives behind every image's tag, in place of the one that is there."""
    return _IMAGE.sub(lambda match: f"{match[1]}{match[2]}@{find(match[2])}", text)


def main(argv: list[str]) -> int:
    """Status 1 where --check finds an image without a digest, 2 for other arguments."""
    if argv not in ([], ["--check"]):
        print("usage: scripts/pin_images.py [--check]", file=sys.stderr)
        return 2
    texts = {ROOT / name: (ROOT / name).read_text() for name in FILES}
    if argv:
        images = sorted({image for text in texts.values() for image in unpinned(text)})
        print(f"not pinned by digest: {', '.join(images)}" if images else "every image is pinned by digest")
        return 1 if images else 0
    names = {image for text in texts.values() for _, image, _ in _IMAGE.findall(text)}
    # All of them before a file is touched.
    found = {image: digest(image) for image in sorted(names)}
    for path, text in texts.items():
        path.write_text(pinned(text, found.__getitem__))
    print("\n".join(f"{image}@{of}" for image, of in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
