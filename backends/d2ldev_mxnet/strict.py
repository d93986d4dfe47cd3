"""What MXNet lets mix, or refuses in other words, is refused here at the operation.

MXNet compares the kinds of device only, and that not everywhere: two GPUs pass, and so do the
CPU's contexts, which the virtual GPUs are. Its Python code calls one library object, ``_LIB``,
whose functions are looked up by name for each call: those few through which every operator runs
are replaced there (``strict_library.py``), and beside them the Python functions that move an
operand without being asked (``strict_python.py``), and those from which MXNet's own errors come
(``strict_errors.py``).

MXNet refuses to mix a 0-dim array of the host with a GPU's arrays, as it does any other, and so
it is refused here; Python numbers and NumPy's arrays are operands of no device. What MXNet's own
code does on its caller's behalf is no mixing: ``set_data``, ``mx.np.array(x, ctx=...)``, a
KVStore's sums over the devices, and ``Module``'s labels from the host. Nothing is refused in what
the Python code of a ``CustomOp`` does with its operands, which MXNet runs in a thread of its own.

Inside a block an operation of two small arrays takes 1.05 to 1.15 times as long, a list of eight
or an assignment 1.2 times, a training step 1.1 times, and a hybridized block no longer.
"""

from __future__ import annotations

from collections.abc import Callable

from d2ldev.errors import UnsupportedValueError
from d2ldev.interface import Backend
from d2ldev.operations.strictness import replace
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_backward import guarded_backward
from d2ldev_mxnet.strict_errors import translating
from d2ldev_mxnet.strict_library import guarded_library
from d2ldev_mxnet.strict_python import guarded_functions


def refuse_mixing(backend: Backend) -> Callable[[], None]:
    """Replace what MXNet's operations run through; returns what puts it back.

    Raises:
        UnsupportedValueError: if MXNet calls its library from compiled Cython modules.
    """
    if mx.nd._internal._imperative_invoke.__module__ != "mxnet._ctypes.ndarray":
        raise UnsupportedValueError(
            "put mxnet under strict()",
            "this MXNet runs its operators from compiled Cython modules, past Python",
            "MXNET_ENABLE_CYTHON=0, before anything imports mxnet",
        )
    return replace(
        [
            *guarded_library(backend),
            *guarded_functions(backend),
            *guarded_backward(backend),
            *translating(backend),
        ]
    )
