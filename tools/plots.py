"""Draw the plots of the documents from the results that are kept: ``python tools/plots.py``.

It needs matplotlib: ``pip install 'd2ldev[plots]'``. ``benchmarks/results/growth-*.json`` and
``scaling-*.json`` have the figures; ``benchmarks/results/plots`` gets a picture of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
PLOTS = RESULTS / "plots"


def main() -> None:
    """Draw a picture of each result, in place of the one that was there."""
    sys.path.insert(0, str(BENCHMARKS))
    import growth
    import scaling

    PLOTS.mkdir(exist_ok=True)
    for path in _kept("growth-*"):
        samples = _read(path)["samples"].items()
        measured = {name: [growth.Sample(**each) for each in sizes] for name, sizes in samples}
        growth.plot(measured, picture_of(path))
    for path in _kept("scaling-*"):
        scaling.plot(_read(path)["rows"], picture_of(path))


def picture_of(path: Path) -> Path:
    """Return where the picture of a result is."""
    return PLOTS / f"{path.stem}.png"


def _kept(pattern: str) -> list[Path]:
    return sorted(RESULTS.glob(f"{pattern}.json"))


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
