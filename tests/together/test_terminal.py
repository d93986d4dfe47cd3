"""The README's picture of a terminal shows what its commands print."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_commands_print_what_the_picture_shows():
    tool = runpy.run_path(str(ROOT / "tools" / "terminal.py"))
    recorded = tool["record"](tool["COMMANDS"])
    assert tool["draw"](recorded) == tool["PICTURE"].read_text(encoding="utf-8")
