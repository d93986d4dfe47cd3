"""Tables for notebooks and for the terminal, and the tracebacks of notebooks.

A table in HTML takes its colours from the page, so that it is readable in a dark notebook.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

MOST_ROWS = 60
"""How many rows of a long table a notebook shows, which saves them in its file."""
_TABLE = '<table style="border-collapse: collapse">'
_CAPTION = '<caption style="text-align: left; white-space: nowrap">'


def is_notebook() -> bool:
    """Return whether a notebook shows what this program displays; IPython is not imported."""
    ipython = sys.modules.get("IPython")
    # During the import of IPython the function does not exist yet.
    find_shell = getattr(ipython, "get_ipython", None)
    return find_shell is not None and getattr(find_shell(), "kernel", None) is not None


def render_traceback(error: BaseException) -> list[str]:
    """Return the traceback that IPython shows for an error, without d2ldev's own frames.

    The frames of backends are hidden, too: their packages are named ``d2ldev_NAME``.

    IPython tells how many frames it skips, and shows the last one always. All of them appear after
    ``get_ipython().InteractiveTB.skip_hidden = False``.

    Args:
        error: one that was raised.
    """
    from IPython import get_ipython

    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package.startswith("d2ldev") or package == "contextlib":  # between two of ours
            frame.f_locals["__tracebackhide__"] = True
        traceback = traceback.tb_next
    lines: list[str] = get_ipython().InteractiveTB.structured_traceback(
        type(error), error, error.__traceback__
    )
    return lines


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with some digits, and a large one with all digits before the point.

    >>> format_number(0.12345), format_number(2.0), format_number(14107.3, 4)
    ('0.123', '2', '14,107')
    """
    # A loss may diverge to a number that nobody reads digit by digit.
    is_large = 10 ** (digits - 1) <= abs(value) < 1e12
    return f"{value:,.0f}" if is_large else f"{value:.{digits}g}"


def format_html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    numbers: Collection[str] = (),
    limit: int | None = None,
) -> str:
    """Return a table in HTML, with all text escaped.

    Args:
        header: the names of the columns; empty for a table whose first column names its rows.
        rows: the cells of each row.
        caption: a line above the table.
        numbers: the names of the columns with numbers, which are aligned to the right.
        limit: the number of rows that are shown: the first and the last of a longer table. None
            shows all.
    """
    # Imported late, because only notebooks need it.
    from html import escape

    def cell(tag: str, value: object, column: int) -> str:
        is_number = column < len(header) and header[column] in numbers
        style = f"text-align: {'right' if is_number else 'left'}; padding: 0.2em 0.6em"
        return f'<{tag} style="{style}">{escape(str(value))}</{tag}>'

    lines = [_TABLE]
    if caption:
        lines.append(f"{_CAPTION}{escape(caption)}</caption>")
    if header:
        cells = "".join(cell("th", name, column) for column, name in enumerate(header))
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for row in rows if limit is None else _shorten(list(rows), limit):
        first = "td" if header else "th"
        cells = "".join(
            cell("td" if column else first, value, column) for column, value in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _shorten(rows: list[Sequence[object]], limit: int) -> list[Sequence[object]]:
    """Return the first and the last rows of a table, with a row of dots between them."""
    if len(rows) <= limit:
        return rows
    half = limit // 2
    return [*rows[:half], ["…"] * len(rows[0]), *rows[half - limit :]]


def make_printable(text: str) -> str:
    r"""Return a text in one line, without the control characters that a terminal obeys.

    >>> make_printable("two\nlines \x1b[2J")
    'two lines ?[2J'
    """
    return replace_unprintable(" ".join(text.split()))


def replace_unprintable(text: str) -> str:
    """Return a text with a question mark for each character that cannot be printed."""
    return "".join(each if each.isprintable() else "?" for each in text)


def format_text_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[str] = ()
) -> str:
    """Return a table in text, whose columns are as wide as their cells.

    Args:
        header, rows, numbers: see ``format_html_table``.
    """
    lines = [list(header), *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            value.rjust(width) if name in numbers else value.ljust(width)
            for name, value, width in zip(header, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
