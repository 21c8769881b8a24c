"""Makes the modules of docs/examples importable, as they are for a script beside them."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))
