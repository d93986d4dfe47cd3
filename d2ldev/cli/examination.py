"""The examination of ``d2ldev doctor``: the machine, the backends and their devices.

It imports only the active backend's framework. ``--all`` tries each of the others in its own
process, because frameworks in one process disturb each other. They all get the cuDNN of the first
framework, and a crash of one would end the examination.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from d2ldev import __version__, settings
from d2ldev._backend import Backend, framework_of
from d2ldev.active import active_backend
from d2ldev.cli.screen import collect_warnings, environment, exit_status, in_words, message_of
from d2ldev.contract.devices import UNKNOWN_MEMORY
from d2ldev.device import Device
from d2ldev.errors import BackendNotInstalledError, InvalidDeviceError
from d2ldev.operations import nvml
from d2ldev.registry import discovery, loading, selection

INSTALLED, MISSING, BROKEN = "installed", "missing", "broken"
_SIZE = 64
# The seconds for a backend in its own process. A first import from a cold disk takes one minute.
_PATIENCE = 300


@dataclass
class BackendReport:
    """One known backend; its fields are the keys that ``d2ldev.cli.doctor`` describes."""

    name: str
    status: str
    missing: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)
    error: str | None = None
    devices: list[dict[str, Any]] | None = None
    real_gpus: int | None = None


@dataclass
class Examination:
    """The results of ``d2ldev doctor``; ``d2ldev.cli.doctor`` describes the keys.

    ``status`` is the exit status: 0, 1 after a failure, 2 after an invalid name.
    """

    active: str | None = None
    reason: str | None = None
    backends: list[BackendReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    status: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``--json``; see ``d2ldev.cli.doctor``."""
        document: dict[str, Any] = {
            "healthy": self.status == 0,
            "active": self.active,
            "reason": self.reason,
            "versions": list_versions(),
            "environment": settings.list_variables(),
            "backends": [vars(report) for report in self.backends],
            "notes": self.notes,
        }
        if self.error is not None:
            document["error"] = self.error
        return document


def examine_machine(*, every_backend: bool) -> Examination:
    """Examine the active backend's devices; with ``every_backend`` also the others'."""
    examination = Examination()
    with collect_warnings() as notes:
        active = error = None
        try:
            active = active_backend()
        except Exception as problem:  # a third party's ``__init__`` may raise anything
            error = problem
        available = discovery.available_backends()
        for name in [*available, *sorted(discovery.find_backends().keys() - {*available})]:
            report = find_report(name)
            if active is not None and name == active.name:
                add_devices(report, active)
            elif error is not None and name == _find_wanted_backend():
                _add_error(report, error)
            elif every_backend and report.status == INSTALLED:
                try_elsewhere(report, notes)
            examination.backends.append(report)
    known = ", ".join(settings.VARIABLES)
    notes += [f"{name} has no effect: d2ldev reads {known}" for name in settings.unknown()]
    examination.notes = notes
    if active is not None:
        examination.active = active.name
        examination.reason = selection.selection_reason()
        examination.status = int(any(_is_sick(report) for report in examination.backends))
    elif error is not None:
        examination.error = message_of(error)
        examination.status = exit_status(error)
    return examination


def _find_wanted_backend() -> str:
    """Return the name of the backend that is active if it can be used."""
    return discovery.canonical_name(selection.choice().name)


def _is_sick(report: BackendReport) -> bool:
    """Return whether an installed backend, or one of its devices, failed in its trial.

    A backend that fails to import does not count: an unused broken package does no harm.
    """
    if report.status == INSTALLED and report.error is not None:
        return True
    return any(device["error"] for device in report.devices or [])


def find_report(name: str) -> BackendReport:
    """Return the report of a known backend, without importing its framework."""
    point = discovery.find_backends()[name]
    found: dict[str, str | None] = {}
    if point.dist is not None and point.dist.name != "d2ldev":
        found[point.dist.name] = point.dist.version
    if problem := loading.conflict(name):
        return BackendReport(name, BROKEN, versions=found, error=problem)
    try:
        missing = discovery.find_missing_modules(name)
    except Exception as error:
        return BackendReport(name, BROKEN, versions=found, error=in_words(error))
    for module in discovery.read_required_modules(name):
        package = module.partition(".")[0]
        found[package.replace("_", "-")] = find_version(package)
    return BackendReport(name, MISSING if missing else INSTALLED, missing, found)


def add_devices(report: BackendReport, backend: Backend) -> None:
    """Add the versions of a loaded backend to its report, and try each of its devices."""
    try:
        report.versions = {name: find_version(name) for name in framework_of(backend).distributions}
        report.devices = [examine_device(backend, device) for device in backend.devices()]
        report.real_gpus = loading.count_real_gpus(backend.name)
    except Exception as error:
        report.error = in_words(error)


def _add_error(report: BackendReport, error: Exception) -> None:
    if isinstance(error, InvalidDeviceError):
        return  # an invalid number of virtual GPUs is not the backend's fault
    if isinstance(error, BackendNotInstalledError) and report.status == INSTALLED:
        report.status = BROKEN
    report.error = report.error or in_words(error).partition("\n")[0]


def try_elsewhere(report: BackendReport, notes: list[str]) -> None:
    """Examine a backend in its own process."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "d2ldev", "doctor", "--json"],
            env=environment(**{settings.BACKEND: report.name}),
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        report.error = f"trying it took longer than {_PATIENCE} s"
        return
    try:
        document = json.loads(process.stdout)
    except ValueError:
        last = process.stderr.strip().rpartition("\n")[2]
        report.error = f"trying it ended with status {process.returncode}: {last}"
        return
    for found in document["backends"]:
        if found["name"] == report.name:
            vars(report).update(found)
    notes += [note for note in document["notes"] if note not in notes]


def examine_device(backend: Backend, device: Device) -> dict[str, Any]:
    """Return the state of a device after computing on it; an error is part of the state."""
    platform = utilisation = error = None
    memory = UNKNOWN_MEMORY
    try:
        platform = backend.platform(device)
        # Before the probe, which itself keeps the GPU busy.
        utilisation = nvml.utilisation_of(device.index) if platform == "cuda" else None
        check_device(backend, device)
        memory = backend.memory(device)
    except Exception as problem:  # a driver or a third party's backend may raise anything
        error = in_words(problem)
    return {
        "device": str(device),
        "platform": platform,
        "memory": memory._asdict(),
        "utilisation": utilisation,
        "probe": "failed" if error else "ok",
        "error": error,
    }


def check_device(backend: Backend, device: Device) -> None:
    """Allocate on a device, compute there, copy to the CPU and back, and check every value.

    Raises:
        RuntimeError: if a result is on another device, or is wrong.
        Exception: any error of the framework.
    """
    ones = backend.ones((_SIZE, _SIZE), dtype="float32", device=device)
    _check_place(backend, ones, device, "the tensor of ones")
    with backend.strict():  # outside of a scope TensorFlow computes on its default device
        product = ones @ ones
    _check_place(backend, product, device, "the product")
    # ``copy``, because on the CPU ``to`` is a no-op.
    on_cpu = backend.copy(product, backend.cpu())
    _check_place(backend, on_cpu, backend.cpu(), "the copy to the CPU")
    again = backend.copy(on_cpu, device)
    _check_place(backend, again, device, "the copy back to the device")
    backend.synchronize(device)
    values = backend.to_numpy(again)
    wrong = int((values != _SIZE).sum())
    if values.shape != (_SIZE, _SIZE) or wrong:
        raise RuntimeError(
            f"ones @ ones of shape {values.shape} has {wrong} values that are not {_SIZE}"
        )


def _check_place(backend: Backend, x: object, device: Device, what: str) -> None:
    there = backend.device_of(x)
    if there is not device:
        raise RuntimeError(f"{what} is on {there}, not on {device}")


def find_version(name: str) -> str | None:
    """Return the version of a distribution, given its name or its module; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # ``tensorflow`` may come from ``tensorflow-cpu``. This reads every distribution's files.
        providers = metadata.packages_distributions().get(name.replace("-", "_"))
        return metadata.version(providers[0]) if providers else None


def list_versions() -> dict[str, str | None]:
    """Return the versions of d2ldev, Python, the platform and NumPy."""
    return {
        "d2ldev": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": find_version("numpy"),
    }
