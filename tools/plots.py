"""Draw the plots of the documents from the results that are kept: ``python tools/plots.py``.

It needs matplotlib. ``benchmarks/results/growth-*.json`` and
``scaling-*.json`` have the figures; ``benchmarks/results/plots`` gets a picture of each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tables import documents

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
PLOTS = RESULTS / "plots"


def main() -> None:
    """Draw a picture of each result, in place of the one that was there."""
    sys.path.insert(0, str(BENCHMARKS))
    import growth
    import scaling

    PLOTS.mkdir(exist_ok=True)
    for name, document in documents(RESULTS, "growth-*"):
        samples = document["samples"].items()
        measured = {row: [growth.Sample(**each) for each in sizes] for row, sizes in samples}
        growth.plot(measured, PLOTS / f"{name}.png")
    for name, document in documents(RESULTS, "scaling-*"):
        scaling.plot(document["rows"], PLOTS / f"{name}.png")


if __name__ == "__main__":
    main()
