"""What authors of backends import to set up the conformance suite, and to run it.

The suite looks for the module ``provision`` in the package of a backend. Each of its functions is
given the backend, and returns builders by name. ``d2ldev_conformance.provision`` describes the
functions.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from d2ldev.contract import Framework
from d2ldev.contract.tensors import Tensor
from d2ldev.device import Device

if TYPE_CHECKING:
    from d2ldev._backend import Backend

__all__ = [
    "CREATIONS",
    "DERIVATIONS",
    "MODULES",
    "Builders",
    "Classifiers",
    "Contents",
    "Freezables",
    "Loops",
    "Orders",
    "array_api_of",
    "check_conformance",
    "framework_of",
    "wrap_mlps",
]

MODULES = ("devices", "tensors", "models", "files", "strict", "training", "parallel")
"""The modules of a backend, in the order in which they are written and tested.

The tests of a module need the modules before it. ``devices`` and ``tensors`` need each other.
"""

Builders = Mapping[str, Callable[[Device], Any]]
"""Functions by name; each makes an object on the device that it is given."""

Classifiers = Mapping[str, tuple[Callable[[Device], Any], tuple[int, ...]]]
"""As ``Builders``, each with the shape of one input of the model that it makes."""

Contents = Mapping[str, tuple[Callable[[int, Device], Any], Callable[[Any], Sequence[Tensor]]]]
"""Builders of objects by name, each with a function that returns some tensors of such an object.

The first takes a seed and a device: with another seed each of these tensors has other values. The
second asks the object itself, and calls nothing of d2ldev.
"""

Loops = Mapping[str, tuple[Callable[[int, Device], dict[str, Any]], Callable[..., None]]]
"""Training loops by name: a function that begins one, and a function that goes on with it.

The first takes a seed and a device, and returns a dict. The second takes the device, and the values
of the dict by their keys.
"""

Freezables = Mapping[str, tuple[Callable[[Device], Any], Callable[[Any, bool], Any]]]
"""Builders of networks by name, each with a function that freezes or unfreezes a part of one."""


Orders = Mapping[
    str, tuple[Callable[[str, int, Device], Any], Callable[[Any], Mapping[str, Sequence[Tensor]]]]
]
"""Builders of models with the parameters ``a`` and ``c`` of one shape, and of their optimizers.

The first takes the order of the optimizer's parameters, a seed and a device: ``'ac'``, ``'ca'``, or
``'a'`` for an optimizer of one. The second returns the tensors of the optimizer for each parameter.
"""


_CREATE: dict[str, Callable[[Any], Any]] = {
    "arange": lambda xp: xp.arange(4),
    "asarray": lambda xp: xp.asarray([[1.0, 2.0]]),
    "empty": lambda xp: xp.empty((2, 2)),
    "eye": lambda xp: xp.eye(2),
    "full": lambda xp: xp.full((2, 2), 7.0),
    "linspace": lambda xp: xp.linspace(0.0, 1.0, 4),
    "ones": lambda xp: xp.ones((2, 2)),
    "zeros": lambda xp: xp.zeros((2, 2)),
}
_DERIVE: dict[str, Callable[..., Any]] = {
    "concat": lambda xp, *xs: xp.concat([*xs, xs[0]], axis=0),
    "empty_like": lambda xp, x: xp.empty_like(x),
    "from_dlpack": lambda xp, x: xp.from_dlpack(x),
    "full_like": lambda xp, x: xp.full_like(x, 7.0),
    "meshgrid": lambda xp, x: xp.meshgrid(x[0, :], x[0, :], indexing="xy"),
    "ones_like": lambda xp, x: xp.ones_like(x),
    "stack": lambda xp, *xs: xp.stack([*xs, xs[0]]),
    "tril": lambda xp, x: xp.tril(x),
    "triu": lambda xp, x: xp.triu(x),
    "zeros_like": lambda xp, x: xp.zeros_like(x),
}
_COMPUTE: dict[str, Callable[..., Any]] = {
    "matmul": lambda xp, x: xp.matmul(x, x),
    "reshape": lambda xp, x: xp.reshape(x, (4,)),
    "sum": lambda xp, x: xp.sum(x),
    "where": lambda xp, x: xp.where(x > 0, x, x),
}

CREATIONS = (*_CREATE, "random")  # any function that draws
"""The calls of ``provision.own_tensors`` that make a tensor of nothing."""

DERIVATIONS = (
    *_DERIVE,
    "gradient",  # of a function of the tensor
    "map",  # a function that is mapped over rows: ``vmap``
    "compile",  # a compiled function of the tensor, such as ``jit`` returns
    "update",  # the tensor with other values in a part: ``x.at[0].set(7.0)``
)
"""The calls of ``provision.own_tensors`` that make a tensor of another one.

``concat`` and ``stack`` also take several tensors of one shape.
"""


def array_api_of(xp: Any) -> dict[str, Callable[..., Any]]:
    """Return calls of a framework's own functions, by their names, for ``provision.own_tensors``.

    They are the creation functions of the array API standard, and some that take tensors. A
    function that the framework does not have under the standard's name is left out.

    Args:
        xp: the module, or the class, that has the functions: ``jax.numpy``.
    """
    creations = {name: lambda *_, make=make: make(xp) for name, make in _CREATE.items()}
    others = {name: partial(call, xp) for name, call in (_DERIVE | _COMPUTE).items()}
    return {name: call for name, call in (creations | others).items() if hasattr(xp, name)}


def framework_of(backend: "Backend[Any, Any]") -> Framework:
    """Return the framework behind a backend, so that a test can call or replace its methods.

    Args:
        backend: any backend; for ``d2ldev.backend`` the active one answers.
    """
    from d2ldev import _backend

    return _backend.framework_of(backend)


def wrap_mlps(
    backend: Any, make: Callable[..., Any], *sizes: Sequence[int]
) -> Callable[[Device], Any]:
    """Return a builder, for ``Builders``, of a model around MLPs.

    Args:
        backend: the backend under test.
        make: the class of the model, which takes the MLPs.
        sizes: of each MLP, as ``backend.mlp`` takes them.
    """

    def build(device: Device) -> Any:
        parts = (backend.mlp(each, seed=seed) for seed, each in enumerate(sizes))
        return backend.place(make(*parts), device)

    return build


def check_conformance(name: str, module: str, *options: str) -> None:
    """Run the conformance suite on one module of a backend, in a process of its own.

    Args:
        name: of the backend.
        module: one of ``MODULES``.
        options: further options of ``d2ldev conformance``, such as ``'--virtual-gpus=2'``.

    Raises:
        AssertionError: if the module does not conform; the message is the output of the command.
    """
    command = [sys.executable, "-m", "d2ldev", "conformance", name, "--only", module, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise AssertionError(f"{' '.join(command[2:])}\n{done.stdout}{done.stderr}")
