"""The fixtures that a backend provides for the suite, in the module ``provision`` of its package.

The contract does not include them. A backend may leave out ``samples``, ``classifiers`` and
``models_of_sequences``: the model of ``backend.mlp`` replaces them. ``MODULE_OF_KIND`` lists
the others.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import pytest

from d2ldev import Backend, Device
from d2ldev.framework import Framework, NotBegunError
from d2ldev.framework.testing import (
    CREATIONS,
    DERIVATIONS,
    Builders,
    Classifiers,
    Contents,
    Freezables,
    Loops,
    Orders,
    framework_of,
)
from d2ldev.registry.loading import find_place

MODULE_OF_KIND = {
    **dict.fromkeys(("hostile_tensors", "own_tensors"), "tensors"),
    **dict.fromkeys(("buffers", "gradients", "ties", "optimizer_states", "loops"), "models"),
    **dict.fromkeys(
        ("composites", "models_with_permutations", "parameter_orders", "views"), "files"
    ),
    **dict.fromkeys(
        (
            *("networks", "networks_with_batch_norm", "freezables", "own_optimizers"),
            *("untrainable_models", "models_without_parameters", "models_with_masks"),
            *("models_with_losses", "models_with_branches", "models_with_tables"),
            *("attention_models", "modes", "modules"),
        ),
        "training",
    ),
}
"""The functions that a module ``provision`` has to have, and the module of the interface that needs
each of them first.

The module names what the framework does not have, with the reason, in a mapping: ``CANNOT =
{"composites": "it has no containers of tensors"}``. A function that is neither there nor in
``CANNOT`` is not begun, and the run fails.
"""


def samples(backend: Backend) -> Builders:
    """Return builders of small objects of every kind that ``place`` handles, by name.

    Each is made on the device that is given: those of ``provision.samples(backend)``, and an MLP.
    """
    return {
        "mlp": lambda device: backend.mlp([3, 4, 1], device=device),
        **_call_provision(backend, "samples", is_optional=True),
    }


def buffers(backend: Backend) -> Contents:
    """Return objects with tensors that are not trained, by name, such as running means."""
    return _call_provision(backend, "buffers")


def gradients(backend: Backend) -> Contents:
    """Return objects that keep gradients, by name, for a framework whose tensors or models do."""
    return _call_provision(backend, "gradients")


def ties(backend: Backend) -> Contents:
    """Return objects of the framework's own that keep one tensor in several places, by name.

    The second function returns the tensor from each of the places.
    """
    return _call_provision(backend, "ties")


def optimizer_states(backend: Backend) -> Contents:
    """Return models with optimizers of the framework's own that have made steps, by name.

    There is one for each kind of state. The second function returns means and momenta.
    """
    return _call_provision(backend, "optimizer_states")


def parameter_orders(backend: Backend) -> Orders:
    """Return models with optimizers that are given the parameters in any order, by name."""
    return _call_provision(backend, "parameter_orders")


def networks(backend: Backend) -> Builders:
    """Return builders of networks with batch normalization and dropout, by name.

    They map four features to two classes. If the framework has lazy networks, one of them gets its
    shapes from the first batch.
    """
    return _call_provision(backend, "networks")


def networks_with_batch_norm(backend: Backend) -> Builders:
    """Return builders of networks as ``networks`` has them, without dropout, by name.

    Each begins with the same values whenever it is made. Training updates its running statistics.
    """
    return _call_provision(backend, "networks_with_batch_norm")


def classifiers(backend: Backend) -> Classifiers:
    """Return builders of networks that learn three classes, by name, each with an input's shape.

    An MLP, and those of ``provision.classifiers(backend)``, such as LeNet.
    """
    return {
        "mlp": (lambda device: backend.mlp([6, 8, 3], device=device), (6,)),
        **_call_provision(backend, "classifiers", is_optional=True),
    }


def freezables(backend: Backend) -> Freezables:
    """Return freezable parts of networks, by name: a network builder, and a function.

    The function takes a network of ``networks`` and a flag. True freezes a part of the network, and
    False unfreezes it.
    """
    return _call_provision(backend, "freezables")


def modes(
    backend: Backend,
) -> Mapping[str, tuple[Callable[[Device], Any], Callable[[Any], Any]]]:
    """Return builders of networks as ``networks`` has them, with layers in several modes, by name.

    One layer may be in evaluation mode, or all but one: each kind in turn, normalization and
    dropout. It is inside of an inner layer. The second function takes a network, and returns the
    mode of each layer as plain values. It asks the network itself.
    """
    return _call_provision(backend, "modes")


def loops(backend: Backend) -> Loops:
    """Return loops that train by hand, by name: what one begins with, and how it goes on.

    The first is given a seed and a device, and returns a dict of ``net`` and its optimizer. The
    second is given the device and these by their names, and makes some steps. All devices get the
    same data. Among the loops is an optimizer that keeps tensors outside of its state, where a
    framework has such optimizers.
    """
    return _call_provision(backend, "loops")


def own_optimizers(backend: Backend) -> Mapping[str, Callable[[Any], Any]]:
    """Return what makes an optimizer of the framework's own for ``backend.mlp``'s model, by name.

    Its state has an effect after 8 of 16 steps: it counts them, or keeps means.
    """
    return _call_provision(backend, "own_optimizers")


def untrainable_models(backend: Backend) -> Builders:
    """Return builders of models that map two features to a number and train nothing, by name."""
    return _call_provision(backend, "untrainable_models")


def models_with_masks(backend: Backend) -> Builders:
    """Return builders of models that are called with ``x`` and ``mask``, by name.

    Both inputs and the output are of shape ``(n, 3)``, and the order of the inputs matters.
    """
    return _call_provision(backend, "models_with_masks")


def models_with_losses(backend: Backend) -> Builders:
    """Return builders of models that compute their loss themselves, by name.

    They are called with ``x``, ``z`` and ``labels``, each None by default. The logits of two
    classes are those of ``x``, of shape ``(n, 3)``, or without it those of ``2 * z``. They return a
    dict with ``'logits'``. With labels it also has ``'loss'``, the mean cross-entropy. Each begins
    with the same values whenever it is made.
    """
    return _call_provision(backend, "models_with_losses")


def models_with_branches(backend: Backend) -> Builders:
    """Return builders of models that compute with one of two layers, by name.

    They map two features to a number. A batch of more than four examples takes one of the layers,
    and a smaller batch the other one.
    """
    return _call_provision(backend, "models_with_branches")


def models_with_tables(backend: Backend) -> Builders:
    """Return builders of models that look up rows of a table of six, by name.

    They map integers of shape ``(n, steps)`` to ``(n, steps, 4)``. Each begins with the same values
    whenever it is made.
    """
    return _call_provision(backend, "models_with_tables")


def models_with_permutations(backend: Backend) -> Builders:
    """Return builders of two dense layers, between which columns change their order, by name.

    They map four features to four. The model is of the class that keeps layers in a sequence.
    """
    return _call_provision(backend, "models_with_permutations")


def attention_models(backend: Backend) -> Builders:
    """Return builders of models whose call leaves a tensor in an attribute, by name.

    They map two features to a number. The tensor has as many rows as the batch. The book's own
    attention leaves ``self.attention_weights`` so.
    """
    return _call_provision(backend, "attention_models")


def composites(
    backend: Backend,
) -> Mapping[str, tuple[Callable[[int], Any], Callable[[Any], Any]]]:
    """Return builders of containers that tensors alone do not make again, by name.

    A builder takes 0 or 1. The two containers have tensors of the same shapes. They differ in other
    values, or in sizes that the shapes do not show. The second function returns a container as
    plain values.
    """
    return _call_provision(backend, "composites")


def views(backend: Backend) -> Contents:
    """Return models of the framework's own, by name, for a framework whose memory can be written.

    The second function returns what another holder of the parameters has. That is views of the same
    memory, or the variables themselves.
    """
    return _call_provision(backend, "views")


def models_without_parameters(backend: Backend) -> Builders:
    """Return builders of models that double their input, and have no parameters, by name."""
    return _call_provision(backend, "models_without_parameters")


def models_of_sequences(backend: Backend) -> Builders:
    """Return builders of models that map ``(n, steps, 2)`` to ``(n, steps, 3)``, by name.

    It is an MLP, if the framework's module does not say otherwise.
    """
    return _call_provision(backend, "models_of_sequences", is_optional=True) or {
        "mlp": lambda device: backend.mlp([2, 3], device=device)
    }


def modules(backend: Backend) -> Mapping[str, Callable[[Device, float], Any]]:
    """Return builders of D2L ``Module``s, of a device and a learning rate, by name.

    Each begins as ``backend.mlp([2, 1])``. Its ``configure_optimizers`` returns gradient descent
    with that rate. Its ``training_step`` returns twice the mean of the squared errors, and its
    ``validation_step`` returns three times the mean.
    """
    return _call_provision(backend, "modules")


def own_tensors(backend: Backend) -> Mapping[str, Callable[..., Any]]:
    """Return calls of the framework's own that return tensors: ``CREATIONS``, ``DERIVATIONS``.

    A call takes a float tensor of shape ``(2, 2)``, and returns a tensor or a sequence of them.
    ``concat`` and ``stack`` also take several. Those of ``CREATIONS`` ignore their argument, and
    ``ones`` is of the same shape. They name no device, if the framework has a default one that can
    be set. ``array_api_of`` returns the calls that a module has under the array API standard's
    names. There may be more than those of ``DERIVATIONS``. ``CANNOT`` says, by the name of a call,
    why it is not given.
    """
    return _call_provision(backend, "own_tensors")


def take_own_call(backend: Backend, name: str) -> Callable[..., Any]:
    """Return a call of ``own_tensors``.

    Args:
        backend: the backend under test.
        name: of the call.

    Raises:
        NotBegunError: if it is missing, and ``CANNOT`` does not say why.
        NotProvidedError: if ``CANNOT`` says why.
    """
    reasons = _inabilities(backend)
    if (reason := reasons.get(name, reasons.get("own_tensors"))) is not None:
        raise NotProvidedError(f"the {backend.name} backend has no such call: {reason}")
    if (call := own_tensors(backend).get(name)) is None:
        raise NotBegunError(f"provision.own_tensors: {name!r}")
    return call


def hostile_tensors(backend: Backend) -> Mapping[str, Callable[[], Any]]:
    """Return builders of tensors that few calls can take, by name: sparse, without bytes ..."""
    return _call_provision(backend, "hostile_tensors")


def find_lasting(framework: Framework, what: str) -> Collection[str]:
    """Return the names of what lasts as long as the process; a name may have wildcards.

    ``provision.LASTING_THREADS`` has names of threads: ``'Thread-* (_handle_workers)'``.
    ``provision.LASTING_FILES`` has paths in the temporary folder: ``'kernel-*'``, where the star
    stands for slashes, too.

    Args:
        framework: whose module ``provision`` is asked.
        what: ``'LASTING_THREADS'`` or ``'LASTING_FILES'``.
    """
    names: Collection[str] = _find(framework, what) or ()
    return names


def list_provided(backend: Backend, provide: Callable[[Backend], Mapping[str, Any]]) -> list[str]:
    """Return the names of objects that the backend provides, in order.

    It is empty if the backend's author has not begun with them.

    Args:
        backend: the backend under test.
        provide: a function of this module.

    Raises:
        pytest.Collector.CollectError: if the backend's function fails, with its line.
    """
    try:
        return sorted(provide(backend))
    except NotBegunError:
        return []
    except Exception as error:
        package = type(framework_of(backend)).__module__.partition(".")[0]
        told = _tell(f"provision.{provide.__name__} of {package} fails", error, package)
        raise pytest.Collector.CollectError(told) from error


class NotProvidedError(Exception):
    """The framework has nothing of a kind: ``provision.CANNOT`` says why.

    Args:
        problem: the reason.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


def check_provided(backend: Backend, what: str) -> None:
    """Check that the backend's provision gives something of a kind.

    Args:
        backend: the backend under test.
        what: the name of a function of this module.

    Raises:
        NotBegunError: if its module has no function of the name, and its ``CANNOT`` does not say
            why.
        NotProvidedError: if ``CANNOT`` says why, or the function returns nothing.
    """
    if not globals()[what](backend):
        reason = _inabilities(backend).get(what, "provision returns none")
        raise NotProvidedError(
            f"the {backend.name} backend has no {what.replace('_', ' ')} for the suite: {reason}"
        )


def check_declared(framework: Framework) -> None:
    """Check the names in ``provision.CANNOT``.

    Raises:
        pytest.UsageError: if the suite asks for no such name, or the module fails to import.
    """
    declared: Mapping[str, str] = _find(framework, "CANNOT") or {}
    known = (*MODULE_OF_KIND, *CREATIONS, *DERIVATIONS)
    for name in declared:
        if name not in known:
            (near,) = get_close_matches(name, known, n=1, cutoff=0)
            raise pytest.UsageError(
                f"CANNOT in provision has {name!r}, which the suite does not ask for; the nearest "
                f"is {near!r}"
            )


def _inabilities(backend: Backend) -> Mapping[str, str]:
    """Return why the provision lacks a function, by its name: ``provision.CANNOT``."""
    reasons: Mapping[str, str] = _find(framework_of(backend), "CANNOT") or {}
    return reasons


def _call_provision(backend: Backend, what: str, *, is_optional: bool = False) -> Mapping[str, Any]:
    """Return what the backend's provision gives; empty if it declares that there is none."""
    provide = _find(framework_of(backend), what)
    if provide is not None:
        found: Mapping[str, Any] = provide(backend)
        return found
    if is_optional or what in _inabilities(backend):
        return {}
    raise NotBegunError(f"provision.{what}")


def _find(framework: Framework, what: str) -> Any:
    """Return what a framework's module ``provision`` has by a name; None if it has nothing."""
    for cls in type(framework).__mro__:
        name = f"{cls.__module__.partition('.')[0]}.provision"
        if _exists(name):
            return getattr(_import(name), what, None)
    return None


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        told = _tell(f"{name} fails to import", error, name.partition(".")[0])
        raise pytest.UsageError(told) from error


def _tell(what: str, error: Exception, package: str) -> str:
    """Return an error of an author's function in one line, with its place."""
    return f"{what}: {type(error).__name__}: {error}{find_place(error, package)}"


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a module that is not a package
        return False
