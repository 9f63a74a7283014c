"""`python -m pagekv.client.cli`, the same as the command `pagekv`."""

from __future__ import annotations

import sys

from pagekv.client.cli.main import main

sys.exit(main())
