"""MXNet, and its NumPy shapes for the length of a block.

All of this package takes MXNet from here, because importing it needs ``import_mxnet``.
"""

from __future__ import annotations

import ctypes

from d2ldev_mxnet.importing import import_mxnet

import_mxnet()
import mxnet as mx  # noqa: E402  # the line before lets it in

__all__ = ["NumPySemantics", "NumPyShapes", "mx"]


class NumPyShapes:
    """NumPy's shapes in a block, in this thread: ``()`` and lengths of 0 are valid shapes.

    Without them MXNet takes both for shapes that are not known yet. ``npx.set_np()`` turns them
    on for good; d2ldev's own calls do not depend on it, and leave it as it was. MXNet's
    ``np_shape`` cannot be left where array semantics are on without shape semantics, and logs.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        before = ctypes.c_int()
        mx.base.check_call(mx.base._LIB.MXSetIsNumpyShape(1, ctypes.byref(before)))
        self._before = before.value

    def __exit__(self, *exception: object) -> None:
        if self._before != 1:
            before = ctypes.c_int()
            mx.base.check_call(mx.base._LIB.MXSetIsNumpyShape(self._before, ctypes.byref(before)))


class NumPySemantics(NumPyShapes):
    """The effect of ``npx.set_np()`` in a block: NumPy's shapes, and NumPy arrays in Gluon."""

    __slots__ = ("_arrays",)

    def __enter__(self) -> None:
        super().__enter__()
        self._arrays = mx.util.np_array(True)
        self._arrays.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._arrays.__exit__(*exception)
        super().__exit__(*exception)
