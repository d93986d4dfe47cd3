"""The area ``models``: how to find the tensors of models and optimizers, to move and save them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

from d2ldev.contract.tensors import Tensor
from d2ldev.device import Device
from d2ldev.errors import NotBegunError


class Role(Enum):
    """What a framework's object keeps a tensor for."""

    PARAMETER = "parameter"
    """It is in the framework's own list of parameters. ``Slot.is_trained`` says more."""
    BUFFER = "buffer"
    """The framework counts it as the object's, and it is no parameter."""
    ATTRIBUTE = "attribute"
    """It is a plain attribute, which the framework does not count.

    ``place`` moves it if it is a tensor. It moves a container if a tensor in it is refilled.
    """
    WORKING = "working"
    """It moves with the object, and no file has it: a gradient, or the sum of a metric."""
    VARIABLE = "variable"
    """An object that holds one tensor, and has no row of its own in ``summarize``."""


class Slot(NamedTuple):
    """One thing that a framework's object keeps.

    Args:
        name: its name in the object, dotted: ``'weight'``, ``'state.0.exp_avg'``.
        value: a tensor, a nesting, another object of the framework, any other object, or a
            ``NoTensor``.
        put: stores another value in its place, and must not fail. It is None for what is never
            replaced: an object, or a tensor that is refilled.
        role: what the object keeps it for. The role of a container is the role of its tensors.
        is_trained: whether training changes a parameter.
        is_saved: whether the framework's own files have it. A file has the tensors in ``value``,
            and no plain numbers: ``Files.state`` is for those. What a call leaves, such as
            attention weights, they lack. Then the tensor may be on one side only, or have another
            shape, unless it is refilled. Without values it is skipped.
        registration: the line by which the object registers a tensor ``x`` as its own, with ``{}``
            for a name. A warning has it that names a tensor in ``value`` that stays.
    """

    name: str
    value: Any
    put: Callable[[Any], object] | None = None
    role: Role = Role.BUFFER
    is_trained: bool = False
    is_saved: bool = True
    registration: str = "self.{} = x"


class NoTensor:
    """A value among the members that should be a tensor, but cannot be placed.

    Args:
        problem: the reason: ``'is not initialised'``.
        fix: the line that creates the tensor.
        is_made_there: whether the framework creates the tensor later, on the model's device at that
            time. Then ``place`` accepts the model, and only ``save`` refuses it.
        is_kept_apart: whether the user keeps all tensors of the model beside it, as in Flax's
            linen. Then ``place`` and ``save`` accept the model, and only ``summarize`` says so.
    """

    def __init__(
        self, problem: str, fix: str, *, is_made_there: bool = False, is_kept_apart: bool = False
    ) -> None:
        self.problem, self.fix = problem, fix
        self.is_made_there, self.is_kept_apart = is_made_there, is_kept_apart


class Models:
    """Methods a framework implements about its models and optimizers; each has a default.

    A framework without models of its own implements only ``mlp``.

    Attributes:
        types: the classes of the models, optimizers and other objects that ``members`` takes apart.
    """

    types: tuple[type, ...] = ()

    # -- making -----------------------------------------------------------------------------------

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Any:
        """Return a multilayer perceptron of the framework's own dense layers, called as ``net(x)``.

        Called by ``backend.mlp``, which brings the values of the parameters to the device.

        Args:
            layers: kernel, of shape ``(n_out, n_in)``, and bias, of shape ``(n_out,)``, for each
                layer, in float32. They are the model's own to keep. A lazy framework computes them.
            activation: ``'relu'``, ``'tanh'`` or ``'sigmoid'``, between the layers.

        Raises:
            NotBegunError: by default.
        """
        raise NotBegunError("Models.mlp", "make an MLP")

    # -- placing ----------------------------------------------------------------------------------

    def members(self, obj: Any) -> Iterable[Slot]:
        """Return what an object of ``types`` keeps: tensors, nestings of tensors, objects.

        Called by ``place``, ``placement``, ``summarize``, ``save`` and ``load_into``.
        """
        return ()

    def find_unsaved(self, model: Any) -> Sequence[str]:
        """Return the names of learned state that files leave out, such as a vocabulary.

        Called by ``save`` for every model and optimizer, which warns of it.
        """
        return ()

    def list_attached(self, x: Tensor) -> Iterable[Slot]:
        """Return the tensors that must stay on a tensor's device: its gradient. Not saved."""
        return ()

    def find_refill(self, x: Tensor) -> Callable[[Tensor], object] | None:
        """Return the function that gives a tensor object other memory, on any device.

        An optimizer that holds such a parameter still holds it after a move. The function gets a
        tensor that is nobody else's, and takes its memory. It must not fail.

        Returns:
            None for a tensor that is not refilled: another object replaces it.
        """
        return None

    def plan_writes(
        self, values: Sequence[tuple[Tensor, Tensor, bool]]
    ) -> Sequence[Callable[[], object] | None]:
        """Return functions that write new values into the memory of tensors.

        Called by ``load_into``. The functions must not fail. By default there are none.

        Args:
            values: a tensor, its new value, and whether the tensor is refilled, or in the
                framework's own list of a model. Any other tensor is a plain attribute, or in a
                container: it is written only if it has the memory of a tensor that is. The new
                value has the same shape, dtype and device.

        Returns:
            A function for each of them, or None. Then the tensor is refilled or replaced. Its
            memory must not be written, or other tensors of that memory have other new values.
        """
        return [None] * len(values)

    def finish(self, obj: Any) -> None:
        """Update an object of ``types`` whose members were moved or loaded. It must not fail."""

    def place_context(
        self, device: Device
    ) -> AbstractContextManager[Callable[..., list[Tensor]] | None]:
        """Return a context around a whole ``place``; its end without an error means success.

        Tensors that share memory may have to share it afterwards, too. Then the context gives a
        function that copies all tensors of a ``place``, in the place of ``Tensors.transfer``.
        """
        return nullcontext()

    def settle(self, obj: Any, device: Device) -> None:
        """Adapt an object of ``types`` to the device that it is on, whether or not it has moved.

        Called by ``place`` and ``mlp`` for every object in a nesting. It must not fail.
        """
