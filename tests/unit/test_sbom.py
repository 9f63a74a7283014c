"""Bills of materials of the images: valid CycloneDX, and what the lists in locks/ have."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REASON = "pip install 'pagekv[dev]', which has cyclonedx-bom"

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {"manager", "gateway", "executor", "gpu"}


@pytest.mark.long
def test_every_image_has_a_bill_of_materials_with_what_it_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here, because a second of processor time goes by, which every process that collects tests would take.
    validator = pytest.importorskip("cyclonedx.validation.json", reason=REASON).JsonStrictValidator
    validate, valid = validator.validate_str, set()

    def validate_str(self: Any, text: str) -> Any:
        error = validate(self, text)
        valid.update([text] if error is None else [])
        return error

    monkeypatch.setattr(validator, "validate_str", validate_str)
    # The grammar of URLs is slow, and the bills have most of them together.
    grammar = importlib.import_module("rfc3987_syntax.syntax_helpers")
    monkeypatch.setattr(grammar, "parse", cache(grammar.parse))
    runpy.run_path(str(ROOT / "scripts" / "sbom.py"))["main"](tmp_path)
    assert {path.name.removesuffix(".cdx.json") for path in tmp_path.iterdir()} == IMAGES
    for image in IMAGES:
        text = (tmp_path / f"{image}.cdx.json").read_text()
        assert text in valid, image
        bill = json.loads(text)
        assert bill["metadata"]["component"]["name"] == "pagekv"
        assert all(each["purl"].startswith("pkg:pypi/") for each in bill["components"])
        listed = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", (ROOT / "locks" / f"{image}.txt").read_text(), re.MULTILINE))
        found = {each["name"]: each["version"] for each in bill["components"]}
        if image == "executor":
            assert found.pop("torch") == listed_version_of_torch()
            assert '"https://download.pytorch.org/whl/cpu/torch/"' in text
        assert found == listed
        hashed = {each["name"] for each in bill["components"] if each["externalReferences"][0].get("hashes")}
        assert hashed == listed.keys()


@pytest.mark.long
def test_a_bill_that_the_schema_forbids_is_an_error() -> None:
    pytest.importorskip("cyclonedx.validation.json", reason=REASON)
    script = runpy.run_path(str(ROOT / "scripts" / "sbom.py"))
    with pytest.raises(ValueError, match=r"^not CycloneDX 1\.6: "):
        script["_valid"]('{"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"type": "library"}]}')


def listed_version_of_torch() -> str:
    """As the list of the GPU image has it."""
    found = re.search(r"^torch==([\w.]+)", (ROOT / "locks" / "gpu.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
