"""docs/flags.md is what the flags' declarations say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_not_stale() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "flags_page.py"))["page"]()
    assert (ROOT / "docs" / "flags.md").read_text() == written, "docs/flags.md is stale: make flags"
