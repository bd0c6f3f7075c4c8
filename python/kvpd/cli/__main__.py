"""``python -m kvpd.cli``."""

from __future__ import annotations

import sys

from kvpd.cli import main

sys.exit(main())
