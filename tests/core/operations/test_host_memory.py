"""The memory of the process where there is no ``/proc``."""

import sys
from types import SimpleNamespace

from d2ldev import Memory
from d2ldev.operations import devices


def test_elsewhere_than_on_linux_psutil_says_it(monkeypatch):
    psutil = SimpleNamespace(
        Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1)),
        virtual_memory=lambda: SimpleNamespace(total=3),
    )
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    assert devices.host_memory() == Memory(1, None, 3)
