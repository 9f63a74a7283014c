"""Bills of materials of the images: valid CycloneDX, and what the lists in locks/ have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REASON = "pip install 'pagekv[dev]', which has cyclonedx-bom"

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {"manager", "gateway", "executor", "gpu"}


@pytest.mark.long
def test_every_image_has_a_bill_of_materials_with_what_it_installs(tmp_path: Path) -> None:
    # Here, because a second of processor time goes by, which every process that collects tests would take.
    schema = pytest.importorskip("cyclonedx.schema", reason=REASON)
    validation = pytest.importorskip("cyclonedx.validation.json", reason=REASON)
    command = [ROOT / "scripts" / "sbom.sh", Path(sys.executable).parent, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name.removesuffix(".cdx.json") for path in tmp_path.iterdir()} == IMAGES
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    for image in IMAGES:
        text = (tmp_path / f"{image}.cdx.json").read_text()
        assert validator.validate_str(text) is None, image
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


def listed_version_of_torch() -> str:
    """As the list of the GPU image has it."""
    found = re.search(r"^torch==([\w.]+)", (ROOT / "locks" / "gpu.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
