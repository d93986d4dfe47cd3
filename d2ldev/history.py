"""``History``: the numbers of a training run, one for each epoch, as a dict that can be drawn.

Held by ``tests/core/training/test_history.py``.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from d2ldev.dependencies import import_optional
from d2ldev.display import MOST_ROWS, format_html_table, format_number, is_notebook

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class History(dict[str, list[float]]):
    """The numbers of a training run: name -> one number for each epoch.

    ``Trainer.fit`` returns it. It equals a dict with the same numbers, and JSON and
    ``backend.save`` write it as a dict. ``History(loaded)`` makes a ``History`` of a loaded dict.

    >>> history = History(loss=[2.5, 0.5], accuracy=[0.25, 0.75])
    >>> history["loss"][-1]
    0.5
    >>> history == {"loss": [2.5, 0.5], "accuracy": [0.25, 0.75]}
    True
    """

    __slots__ = ()

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw each number by epoch, without the learning rate, and return the axes.

        The call shows no window, and changes no setting of Matplotlib. In a notebook the drawing
        appears below the cell. Elsewhere ``history.plot().figure.savefig("loss.png")`` writes it
        into a file.

        Args:
            ax: the axes of Matplotlib to draw on. None makes a new figure. Outside of a notebook
                ``pyplot`` does not know that figure: for a window, give ``ax=plt.gca()``.

        Returns:
            The axes, with a line for each name.

        Raises:
            PackageNotInstalledError: if Matplotlib is missing.

        >>> history.plot().figure.savefig("loss.png")                      # doctest: +SKIP
        """
        attempted = "plot a history"
        ticker = import_optional("matplotlib.ticker", attempted, extra="plots")
        if ax is None:
            ax = _make_axes(attempted)
        for name, values in self.items():
            if name == "lr":  # on the axis of the losses it would be a line at 0
                continue
            # The line of the validation data is dashed, so that it reads without colours, too.
            style = "--" if name.startswith("val_") else "-"
            ax.plot(range(1, len(values) + 1), values, style, marker=".", label=name)
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if self:
            ax.legend()
        return ax

    def _repr_html_(self) -> str:
        header = ["epoch", *self]
        rows = [
            [number, *("" if value is None else format_number(value, 4) for value in values)]
            for number, values in enumerate(zip_longest(*self.values()), 1)
        ]
        return format_html_table(header, rows, numbers=header, limit=MOST_ROWS)


def _make_axes(attempted: str) -> Axes:
    """Return the axes of a new figure, which a notebook shows below the cell."""
    if is_notebook():
        # The notebook shows the figures that pyplot knows, and closes them after the cell.
        pyplot = import_optional("matplotlib.pyplot", attempted, extra="plots")
        figure = pyplot.figure()
    else:
        figure = import_optional("matplotlib.figure", attempted, extra="plots").Figure()
    axes: Axes = figure.add_subplot()
    return axes
