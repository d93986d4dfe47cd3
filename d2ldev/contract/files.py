"""The area ``files``: how to write a framework's tensors and models into a file, and read them.

A dense layer's kernel is ``(out, in)`` in torch and Gluon, and ``(in, out)`` in Keras and Flax. A
convolution's kernel is ``(out, in, *window)`` or ``(*window, in, out)``. Frameworks flatten the
output of a convolution with the channels first, or last. So the columns of the next dense kernel
have another order. A ``Layout`` belongs to one tensor of a model. It names the tensor's layer. It
also says how to convert the tensor to the first of these forms, the canonical one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.contract.tensors import Tensor, Tensors
from d2ldev.errors import UnsupportedValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Layout(NamedTuple):
    """The conversion of a tensor of a model to the canonical form.

    Args:
        role: its name in every framework: ``'0.weight'``.
        split: first reshape it to this shape.
        axes: then transpose its axes to this order.
        shape: then reshape it to this shape.
    """

    role: str
    split: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def canonical(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the values in the canonical form."""
        return array.reshape(self.split).transpose(self.axes).reshape(self.shape)

    def native(self, array: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """Return canonical values in the form of a tensor of this shape."""
        split = [self.split[axis] for axis in self.axes]
        order = [self.axes.index(axis) for axis in range(len(self.axes))]
        return array.reshape(split).transpose(order).reshape(tuple(shape))


def same(role: str, shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor whose form is the canonical one."""
    sizes = tuple(shape)
    return Layout(role, sizes, tuple(range(len(sizes))), sizes)


def turn(role: str, shape: Sequence[int]) -> Layout:
    """Return the layout of a kernel with ``in`` and ``out`` at its end: ``(*window, in, out)``."""
    sizes = tuple(shape)
    axes = (len(sizes) - 1, len(sizes) - 2, *range(len(sizes) - 2))
    return Layout(role, sizes, axes, tuple(sizes[axis] for axis in axes))


def turn_after_flattening(role: str, shape: Sequence[int], channels: int) -> Layout:
    """Return the layout of a dense kernel ``(in, out)`` after a convolution, channels last."""
    n_in, n_out = shape
    split = (n_in // channels, channels, n_out)
    return Layout(role, split, (2, 1, 0), (n_out, n_in))


class Layer(NamedTuple):
    """A dense or a convolution layer.

    Args:
        weight: its kernel; None if it has none yet.
        bias: None if it has none.
        layout: ``(role, shape) -> Layout`` of the kernel.
    """

    weight: Any
    bias: Any
    layout: Callable[[str, tuple[int, ...]], Layout] = same


SPARSE = "it is sparse: save a dense copy of it, or the tensors that it is made of"
"""What ``Files.borrow`` says of a sparse tensor."""


class Files:
    """Methods a framework implements about files; each has a default, with one copy more.

    Args:
        tensors: the framework's area of tensors, for the defaults.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    # -- tensors ----------------------------------------------------------------------------------

    def borrow(self, x: Tensor) -> NDArray[Any]:
        """Return the values in a NumPy array, which the caller does not write to.

        The array may alias the tensor's memory. JAX's random keys have a dtype that no file
        has. For such a dtype the array has the numbers behind the values. ``save`` calls it.

        Raises:
            ValueError: if numbers, dtype and shape are not enough to create the tensor again. The
                message names the object to save instead.
        """
        return self.tensors.to_numpy(x)

    def adopt(self, array: NDArray[Any], dtype: str, native: Any) -> Tensor:
        """Return a tensor with the values of an array that nobody else holds.

        Called by ``load``.

        Args:
            array: of the numbers; the tensor may alias it. It begins at a multiple of 64 bytes.
            dtype: the name of the tensor's dtype: the array's, or one that such numbers represent.
            native: the framework's own device.
        """
        return self.tensors.from_data(array, self.tensors.dtype(dtype), native)

    # -- models -----------------------------------------------------------------------------------

    def layers(self, model: Any) -> Sequence[Layer] | None:
        """Return the dense and convolution layers of a model in one sequence, in order.

        None for anything else, and if a layer between them reorders its input. Such a model can
        load the parameters of the same layers in another framework. Called for every object and
        container that is saved.
        """
        return None

    def complete(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        undo: Callable[..., object],
        *,
        is_strict: bool,
    ) -> tuple[Collection[str], Collection[str]]:
        """Make the tensors that a model would make at its first batch or step, as a file has them.

        Called by ``load_into`` before it compares.

        Args:
            model: one of ``Models.types``.
            shapes, dtypes: of the tensors in the file, by names as ``named_tensors`` gives them.
            undo: called before each change with a function that takes it back, and the function's
                arguments. If the file is refused, the functions are called, the last first. They
                must not fail.
            is_strict: whether all names have to be on both sides. If not, what the file has of
                another object under the same names may be left alone, too.

        Returns:
            The names of tensors that the file lacks, and that ``Models.members`` does not have yet.
            And the names of tensors that ``load_into`` leaves alone, here and in the file. The
            framework itself reads them from no file, or only if the file has them.

        Raises:
            ValueError: if it cannot make them; the message says how the user can.
        """
        return (), ()

    # -- optimizers -------------------------------------------------------------------------------

    def state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        """Return the state of an optimizer, without the parameters, as a nesting.

        None for a model, and for an optimizer whose whole state is tensors of ``Models.members``.
        An optimizer that counts its steps in a plain number has a state.
        """
        return None

    def list_parameters(self, optimizer: Any) -> Sequence[tuple[str, Tensor]]:
        """Return the parameters of an optimizer in the order of its state.

        Each has the name that the optimizer gives it, which is empty if it gives none. Files find
        the parameters in the models that are saved together with the optimizer. Called for every
        model and optimizer. Empty for a model, and for an optimizer whose state has names.
        """
        return ()

    def prepare_state(
        self, optimizer: Any, state: Any, order: Sequence[int] | None = None
    ) -> Callable[[], None]:
        """Return a function that restores a state; nothing changes before you call it.

        Args:
            optimizer: an optimizer for which ``state`` returns a nesting.
            state: a nesting that may be its state, with tensors on the CPU that nobody else uses.
            order: for each of ``list_parameters`` its position in the state. Given only if some
                have other positions.

        Returns:
            A function that cannot fail.

        Raises:
            ValueError: if this optimizer cannot take the state, with the reason.
        """
        raise UnsupportedValueError(
            "load the state of an optimizer",
            f"a {type(optimizer).__name__} takes no state",
            "load its tensors: backend.load(path)",
        )
