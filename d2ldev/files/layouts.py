"""The same layers in the layouts of another framework.

A dense layer's kernel is ``(out, in)`` in torch and Gluon, ``(in, out)`` in Keras and Flax; that
of a convolution is ``(out, in, *window)`` or ``(*window, in, out)``; and what a convolution puts
out is flattened with the channels first, or last, so that the kernel of the dense layer after it
has other columns. A ``Layout`` says for one tensor of a model which layer it belongs to, and how
it is brought into the first of these forms, which is called canonical.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.files.format.header import HeaderError, is_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Layout(NamedTuple):
    """How a tensor of a model is brought into the canonical form.

    Args:
        role: what it is in the model, the same in every framework: ``'0.weight'``.
        split: it is given this shape first.
        axes: then its axes are put into this order.
        shape: then it is given this shape.
    """

    role: str
    split: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def canonical(self, array: NDArray[Any]) -> NDArray[Any]:
        """The values in the canonical form."""
        return array.reshape(self.split).transpose(self.axes).reshape(self.shape)

    def native(self, array: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """The values in the form that a tensor of this shape has, from the canonical one."""
        split = [self.split[axis] for axis in self.axes]
        order = [self.axes.index(axis) for axis in range(len(self.axes))]
        return array.reshape(split).transpose(order).reshape(tuple(shape))


def same(role: str, shape: Sequence[int]) -> Layout:
    """That of a tensor whose form is the canonical one."""
    sizes = tuple(shape)
    return Layout(role, sizes, tuple(range(len(sizes))), sizes)


def turned(role: str, shape: Sequence[int]) -> Layout:
    """That of a kernel with ``in`` and ``out`` at its end: ``(*window, in, out)``."""
    sizes = tuple(shape)
    axes = (len(sizes) - 1, len(sizes) - 2, *range(len(sizes) - 2))
    return Layout(role, sizes, axes, tuple(sizes[axis] for axis in axes))


def turned_after_flattening(role: str, shape: Sequence[int], channels: int) -> Layout:
    """That of a dense kernel ``(in, out)`` behind a convolution whose channels come last."""
    n_in, n_out = shape
    split = (n_in // channels, channels, n_out)
    return Layout(role, split, (2, 1, 0), (n_out, n_in))


def layouts_of(told: Any) -> dict[str, Layout]:
    """The layouts in a file.

    Raises:
        HeaderError: if they are none.
    """
    if not isinstance(told, dict):
        raise HeaderError("its layouts are none")
    return {name: _layout_of(what) for name, what in told.items()}


def _layout_of(what: Any) -> Layout:
    if not isinstance(what, list) or len(what) != 4:
        raise HeaderError("one of its layouts is none")
    role, split, axes, shape = what
    if (
        not isinstance(role, str)
        or not all(is_sizes(size) for size in (split, axes, shape))
        or sorted(axes) != list(range(len(split)))
        or math.prod(split) != math.prod(shape)
    ):
        raise HeaderError("one of its layouts is none")
    return Layout(role, tuple(split), tuple(axes), tuple(shape))


def by_role(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """The names of a model's tensors by what they are in it."""
    return {layout.role: name for name, layout in layouts.items()}
