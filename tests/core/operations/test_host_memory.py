"""The memory of the process where there is no ``/proc``."""

import sys
from types import SimpleNamespace

import pytest
from installs import find_extras

from d2ldev import PackageNotInstalledError
from d2ldev.framework import Memory
from d2ldev.operations import devices


def test_outside_of_linux_psutil_reports_the_memory(monkeypatch):
    psutil = SimpleNamespace(
        Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1)),
        virtual_memory=lambda: SimpleNamespace(total=3),
    )
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    assert devices.host_memory() == Memory(1, None, 3)


def test_outside_of_linux_a_missing_psutil_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    with pytest.raises(PackageNotInstalledError, match="psutil") as error:
        devices.host_memory()
    assert find_extras(error.value.fix) == ["memory"]
    # Nobody has asked for it who makes a tensor.
    assert devices.memory_of_the_machine() is None
