"""``d2ldev doctor``: which backend is active and why, and whether its devices work.

The document of ``--json`` has these keys:

- ``healthy``: whether there is an active backend, and no trial failed.
- ``active``, ``reason``: the active backend's name and why it is active; null if it has an error.
- ``versions``: ``d2ldev``, ``python``, ``platform``, ``numpy``.
- ``environment``: the variables ``D2LDEV_*`` that are set.
- ``backends``: a list of backends, best first.
- ``notes``: d2ldev's warnings.
- ``error``: the reason if there is no active backend; else the key is missing.

A backend has these keys:

- ``name``, ``status`` (``installed``, ``missing``, ``broken``), ``error`` (or null);
- ``missing``: the modules that are not installed; ``versions``: distribution -> version or null;
- ``real_gpus``: the number of GPUs in the machine, also if virtual GPUs replace them; null if it
  was not tried;
- ``devices``: a list of devices; null if they were not tried.

A device has these keys:

- ``device``, ``platform``, ``probe`` (``ok``, ``failed``), ``error`` (or null);
- ``memory``: ``used``, ``peak``, ``total`` in bytes, or null;
- ``utilisation``: in per cent; null without NVIDIA's driver.

The exit status is 1 if the active backend cannot be used, or if a device failed, and else 0.
Without ``--json`` it is 2 if the backend's name or the number of virtual GPUs is invalid.
"""

from __future__ import annotations

import json
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from d2ldev import settings
from d2ldev.cli.examination import (
    BROKEN,
    INSTALLED,
    MISSING,
    BackendReport,
    Examination,
    examine_machine,
    list_versions,
)
from d2ldev.cli.screen import complain, make_console, only_for_the_result, show_note
from d2ldev.dependencies import write_install
from d2ldev.registry import discovery

_STATUS_STYLES = {INSTALLED: "green", MISSING: "dim", BROKEN: "red"}
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def run(*, as_json: bool, every_backend: bool) -> int:
    """Examine the machine, show the result, and return the exit status."""
    if as_json:
        with only_for_the_result():
            examination = examine_machine(every_backend=every_backend)
        sys.stdout.write(json.dumps(examination.as_json(), indent=2) + "\n")
        return min(examination.status, 1)
    examination = examine_machine(every_backend=every_backend)
    show(make_console(), examination)
    if examination.error is not None:
        complain(examination.error)
    return examination.status


def show(console: Console, examination: Examination) -> None:
    """Print an examination as text and tables."""
    console.print(_format_heading(examination))
    console.print(_make_facts())
    console.print(_make_backends_table(examination))
    for report in examination.backends:
        if report.devices is not None:
            console.print(_make_devices_table(report))
            _show_errors(console, report)
    for note in [*examination.notes, *_describe_virtual_gpus(examination)]:
        show_note(console, note)


def _format_heading(examination: Examination) -> Text:
    if examination.active is None:
        return Text("There is no active backend; see the error at the end.", style="bold red")
    return Text.assemble(
        "The active backend is ", (examination.active, "bold green"), f": {examination.reason}."
    )


def _make_facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, version in list_versions().items():
        table.add_row(name, Text(version or "-"))
    variables = [f"{name}={value}" for name, value in settings.list_variables().items()]
    table.add_row("environment", Text("\n".join(variables) or "no D2LDEV_* variable is set"))
    return table


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in columns:
        # The last column gets the remaining width.
        table.add_column(name, no_wrap=name is not columns[-1], overflow="fold")
    return table


def _make_backends_table(examination: Examination) -> Table:
    table = _make_table("\nBackends", "backend", "state", "versions, or what is missing")
    for report in examination.backends:
        active = report.name == examination.active
        name = Text(f"{report.name} *" if active else report.name, style="bold" if active else "")
        state = Text(report.status, style=_STATUS_STYLES[report.status])
        table.add_row(name, state, _describe(report))
    return table


def _describe(report: BackendReport) -> Text:
    if report.status == MISSING:
        text = f"{', '.join(report.missing)} missing"
        if report.name in (*discovery.PREFERENCE, discovery.FALLBACK):
            text += f": {write_install(report.name)}"
        return Text(text)
    if report.error is not None:
        return Text(report.error, style="red")
    found = [f"{name} {version}" for name, version in report.versions.items() if version]
    return Text(", ".join(found) or "-")


def _make_devices_table(report: BackendReport) -> Table:
    devices = report.devices or []
    is_asked = any(device["utilisation"] is not None for device in devices)
    columns = ("device", "platform", "memory in use", "probe", *(("busy",) if is_asked else ()))
    table = _make_table(f"Devices of {report.name}", *columns)
    for device in devices:
        failed, busy = device["error"] is not None, device["utilisation"]
        table.add_row(
            device["device"],
            device["platform"] or "-",
            _format_memory(device["memory"]),
            Text("failed" if failed else "ok", style="red" if failed else "green"),
            *(() if busy is None else (f"{busy} %",)),
        )
    return table


def _format_memory(memory: dict[str, int | None]) -> str:
    used, total = memory["used"], memory["total"]
    return format_bytes(used) if total is None else f"{format_bytes(used)} of {format_bytes(total)}"


def _show_errors(console: Console, report: BackendReport) -> None:
    """Print the errors in full below the table, which is too narrow for them."""
    for device in report.devices or []:
        if device["error"] is not None:
            place = f"{report.name}, {device['device']}: "
            console.print(Text.assemble((place, "bold red"), device["error"]))


def _describe_virtual_gpus(examination: Examination) -> list[str]:
    return [
        f"{', '.join(names)} of {report.name}: virtual. Memory and device rules are a GPU's, and "
        f"the CPU computes. {_describe_replaced_gpus(report)}"
        for report in examination.backends
        if (names := [d["device"] for d in report.devices or [] if d["platform"] == "virtual"])
    ]


def _describe_replaced_gpus(report: BackendReport) -> str:
    if not report.real_gpus:
        return f"{report.name} finds no real GPU here."
    number = "1 real GPU" if report.real_gpus == 1 else f"{report.real_gpus} real GPUs"
    return f"In this process they replace the {number} of the machine."


def format_bytes(size: int | None) -> str:
    """Return a number of bytes as text; ``'-'`` for None.

    >>> format_bytes(None), format_bytes(512), format_bytes(80 * 2**30)
    ('-', '512 B', '80.0 GiB')
    """
    if size is None:
        return "-"
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, len(_UNITS))
    return f"{size / 1024**power:.1f} {_UNITS[power - 1]}"
