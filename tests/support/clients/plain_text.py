"""The mark of tests whose callers speak plain text: over HTTP, by commands of the README, by processes of their own."""

from __future__ import annotations

import pytest
from support.clients import tls_on

plain_text = pytest.mark.skipif(
    tls_on.ASKED_FOR, reason="its callers speak plain text; with TLS and keys: tests/e2e/test_identity.py"
)
