"""`python -m pagekv.kvmanager.replay`, which `pagekv replay` starts."""

from __future__ import annotations

import sys

from pagekv.kvmanager.replay.cli import main

sys.exit(main())
