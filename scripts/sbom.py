"""Writes a bill of materials for each image, as CycloneDX 1.6 in JSON: pagekv and every Python distribution that the
image holds, with versions, package URLs and the hashes of locks/. The same lists give the same bytes.

usage: python scripts/sbom.py [FOLDER]     FOLDER: build/sbom, if none is given

What the base image brings, Python itself and Debian's packages, is not in it: that takes a scanner of built images.
"""

from __future__ import annotations

import logging
import re
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "sbom"
IMAGES = ("manager", "gateway", "executor", "gpu")
VERSION = SchemaVersion.V1_6
PYPI = "https://pypi.org/simple"
# The tool that makes a bill. Its command line is its only interface.
TOOL = "cyclonedx_py"
# A bill is validated here instead, once its text is final.
FLAGS = ("--output-reproducible", "--spec-version", VERSION.to_version(), "--output-format", "JSON", "--no-validate")


def bill_of(image: str) -> str:
    """The bill of an image. Raises ValueError if it is no valid CycloneDX."""
    text = (ROOT / "locks" / f"{image}.txt").read_text()
    if image != "executor":
        return _valid(_made_from(text))
    # torch's CPU build comes from an index of its own, and stands in no list.
    torch = dict(re.findall(r"^ARG (\w+)=(.*)$", (ROOT / "executor" / "Dockerfile").read_text(), re.MULTILINE))
    bill = _made_from(f"{text}{torch['TORCH']}\n")
    return _valid(bill.replace(f"{PYPI}/torch/", f"{torch['TORCH_INDEX']}/torch/"))


def _made_from(requirements: str) -> str:
    """The tool's bill of these requirements. The tool runs in this process, so that the grammars of its validator,
    which take more than a second to load, are loaded once for all bills.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed, bill = Path(folder) / "requirements.txt", Path(folder) / "bill.json"
        listed.write_text(requirements)
        command = [TOOL, "requirements", "--pyproject", f"{ROOT / 'pyproject.toml'}", *FLAGS]
        command += ["--output-file", f"{bill}", f"{listed}"]
        with patch.object(sys, "argv", command), warnings.catch_warnings(action="ignore"):
            try:
                runpy.run_module(TOOL, run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
        return bill.read_text()


def _valid(bill: str) -> str:
    """The bill itself. Raises ValueError if the schema does not allow it."""
    if (error := JsonStrictValidator(VERSION).validate_str(bill)) is not None:
        raise ValueError(f"not CycloneDX {VERSION.to_version()}: {error}")
    return bill


def main(out: Path = OUT) -> None:
    """Writes the bills of all images to `out`, and their paths to standard output."""
    out.mkdir(parents=True, exist_ok=True)
    # Of each bill the tool would say that it is not validated.
    logging.getLogger("CDX").addFilter(lambda record: record.getMessage() != "Validation skipped.")
    for image in IMAGES:
        path = out / f"{image}.cdx.json"
        path.write_text(bill_of(image))
        print(path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
