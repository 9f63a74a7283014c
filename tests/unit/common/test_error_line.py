"""The one line that programs read of a failure."""

from __future__ import annotations

import json

from pagekv.common.error_line import FAILED, error_line


def test_a_failure_is_one_line_with_its_facts() -> None:
    line = error_line(FAILED, "two\nlines", field="prompt")
    assert "\n" not in line
    assert json.loads(line) == {"error": {"code": "FAILED", "field": "prompt", "message": "two\nlines"}}
