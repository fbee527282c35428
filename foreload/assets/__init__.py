"""Package data: the bundled model `mini`, its draft, and the prompts the demo records."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent
