"""The plot of an exercise: the time against the size, with a line for each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d2ldev.bench.results import VIRTUAL
from d2ldev.dependencies import import_optional
from d2ldev.errors import UnsupportedValueError, quote


class Plot:
    """An empty plot, which a measurement fills.

    Args:
        path: the file to write; its suffix is the format.

    Raises:
        PackageNotInstalledError: if Matplotlib is missing.
        UnsupportedValueError: if Matplotlib does not write such a file, or there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        attempted = f"plot into {path}"
        self._path = path
        self._figure: Any = import_optional("matplotlib.figure", attempted, extra="plots").Figure()
        formats = self._figure.canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in formats:
            problem = f"Matplotlib does not write {quote(path.suffix)}, only {', '.join(formats)}"
            fix = f"--plot {path.with_suffix('.png')}"
            raise UnsupportedValueError(attempted, problem, fix)
        if not path.parent.is_dir():
            raise UnsupportedValueError(
                attempted, f"there is no folder {path.parent}", f"mkdir -p {path.parent}"
            )

    def write(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Draw the results of an exercise on several backends, and write the file.

        Args:
            results: the documents of ``Result.as_json``.
        """
        axes = self._figure.subplots()
        for result in results:
            lines: dict[str, list[tuple[int, float]]] = {}
            for row in result["rows"]:
                name = f"{result['backend']} {row['device']}"
                if row["platform"] == VIRTUAL:
                    name += ", virtual"
                if row["figures"] is not None:
                    lines.setdefault(name, []).append((row["size"], row["figures"]["seconds"]))
            for name, points in lines.items():
                axes.loglog(*zip(*points, strict=True), marker=".", label=name)
        axes.set_xlabel("rows and columns of the matrices")
        axes.set_ylabel("seconds for a product")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(visible=True, alpha=0.3)
        if axes.lines:
            axes.legend()
        self._figure.savefig(self._path)
