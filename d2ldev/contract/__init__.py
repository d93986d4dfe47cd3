"""The interface for authors of backends: a ``Framework`` with seven areas.

``d2ldev.framework`` exports it, with the helpers of the core. The core itself imports it from here.

Design rules, as in einops' backends:

- Native tensors go in and come out. A framework wraps nothing.
- Each area is a small object with public methods. ``devices`` and ``tensors`` are required. The
  other five have a default for every method. ``d2ldev.Backend`` derives the user's calls from
  them, once.
- The core has checked the arguments of a method, and the devices exist. It translates the errors
  that the method raises.
- A copy happens only where the user wrote one, and never by way of another device.
- A framework's state changes only where the user asked for it.

An entry point of the group ``d2ldev.backends`` names a subclass of ``Framework``. The class imports
the framework in its ``__init__``. The package lists the modules that it needs in ``requires``. A
framework owns a tensor if its class, or a base of the class, comes from one of these modules.
``libraries = ("flax", "optax")`` names further libraries of the framework. Other backends name them
in errors about their models. ``environment = ("ENGINE_FLAGS=--cpus={cpus}",)`` is the flag with
which a framework makes devices of the CPU when it starts. d2ldev sets it for virtual GPUs.

``d2ldev conformance NAME`` runs the conformance suite on a backend. The module ``provision`` of the
package has the fixtures of the suite.
"""

from d2ldev.contract.devices import Devices, Memory
from d2ldev.contract.files import Files, Layer, Layout
from d2ldev.contract.framework import INTERFACE, Framework
from d2ldev.contract.models import Models, NoTensor, Role, Slot
from d2ldev.contract.parallel import Parallel
from d2ldev.contract.strict import Strict, Strictness
from d2ldev.contract.tensors import Tensor, Tensors
from d2ldev.contract.training import (
    Learner,
    Portion,
    Sharded,
    Training,
    TrainingSettings,
    Weighted,
)
from d2ldev.typing import DeviceLike, DTypeLike, Shape

__all__ = [
    "INTERFACE",
    "DTypeLike",
    "DeviceLike",
    "Devices",
    "Files",
    "Framework",
    "Layer",
    "Layout",
    "Learner",
    "Memory",
    "Models",
    "NoTensor",
    "Parallel",
    "Portion",
    "Role",
    "Shape",
    "Sharded",
    "Slot",
    "Strict",
    "Strictness",
    "Tensor",
    "Tensors",
    "Training",
    "TrainingSettings",
    "Weighted",
]
