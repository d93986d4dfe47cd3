"""What ``npx.set_np()`` does, for the length of a block."""

import contextlib

import mxnet as mx


@contextlib.contextmanager
def NumPySemantics():  # noqa: N802  # as MXNet names its own
    """NumPy's shapes, and NumPy's arrays in Gluon."""
    with mx.util.np_shape(True), mx.util.np_array(True):
        yield
