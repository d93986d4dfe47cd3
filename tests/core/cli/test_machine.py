"""The machine that figures come from."""

import os

import pytest

from d2ldev.bench import machine


def test_the_processor_is_the_one_that_linux_names(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name : A Chip: fast\nprocessor : 1\nmodel name : Other\n")
    monkeypatch.setattr(machine, "_CPUINFO", path)
    assert machine.find_processor() == "A Chip: fast"


def test_without_the_file_python_names_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine.platform, "processor", lambda: "some chip")
    assert machine.describe_machine()["processor"] == "some chip"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("echo 'A Card, 5.1'; echo 'B, 5.1'", ["A Card (driver 5.1)", "B (driver 5.1)"]),
        ("exit 9", []),
        (None, []),
    ],
    ids=["two cards", "a driver that fails", "no driver"],
)
def test_the_cards_are_those_that_the_driver_s_program_names(program, found, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path) if program is None else f"{tmp_path}:{os.defpath}")
    if program is not None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    assert machine.list_cards() == found


@pytest.mark.parametrize(
    ("load", "cores", "is_loaded"),
    [(None, 2, False), (0.5, 2, False), (0.6, 2, True), (2.0, 16, False), (5.0, 16, True)],
)
def test_a_loaded_machine_is_warned_of(load, cores, is_loaded):
    warning = machine.warn_of_load(load, cores)
    assert bool(warning) == is_loaded


def test_a_system_without_a_load_average_has_none(monkeypatch):
    monkeypatch.delattr(os, "getloadavg")
    assert machine.read_load() is None
