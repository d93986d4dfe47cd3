"""What a backend provides for the suite: the module ``provision`` of its package.

Set-up of tests is no part of the contract. A backend whose package has no such module is tested
with the models that ``backend.mlp`` makes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from d2ldev import Backend, Device

Builders = Mapping[str, Callable[[Device], Any]]


def samples(backend: Backend) -> Builders:
    """Return builders of small objects of every kind that ``place`` looks after, by name.

    Each is made on the device that is given: those of ``provision.samples(backend)``, and an MLP.
    """
    found: dict[str, Callable[[Device], Any]] = {
        "mlp": lambda device: backend.mlp([3, 4, 1], device=device)
    }
    for cls in type(backend.framework).__mro__:
        name = f"{cls.__module__.partition('.')[0]}.provision"
        if _exists(name):
            found.update(importlib.import_module(name).samples(backend))
            break
    return found


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a module that is no package
        return False
