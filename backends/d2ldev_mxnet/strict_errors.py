"""MXNet's own errors of operands on different devices, in d2ldev's words."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from d2ldev.errors import DeviceMismatchError
from d2ldev.interface import Backend
from d2ldev.operations.strictness import Operand, mismatch
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_library import Replacement

_CONTEXT = r"(\w+)\((\d+)\)"
# ``Parameter._check_and_get``
_PARAMETER = re.compile(
    rf"Parameter '(.+?)' was not initialized on context {_CONTEXT}\. "
    rf"It was only initialized on \[{_CONTEXT}"
)
# ``CachedOp::Forward`` in ``cached_op.cc``
_CACHED = re.compile(rf"same context\. But (\S+) is on {_CONTEXT} while (\S+) is on {_CONTEXT}")
# ``HybridBlock.forward``
_INPUTS = re.compile(r"Find multiple contexts in the input.*Find all contexts = \{(.*)\}")
# ``GetContext`` in ``imperative_utils.h``
_OPERATOR = re.compile(
    rf"Operator (\S+) require all inputs live on the same context\. "
    rf"But the first argument is on {_CONTEXT} while the (\d+)-th argument is on {_CONTEXT}"
)


def translated(
    backend: Backend, error: BaseException, operation: str = "an operation of mxnet"
) -> DeviceMismatchError | None:
    """What an error of MXNet's says about mixed devices; None if it is another."""
    text = str(error)
    if not isinstance(error, (RuntimeError, ValueError)):
        return None
    named: list[tuple[str, str, str]] = []
    if found := _PARAMETER.search(text):
        parameter, *there, kind, index = found.groups()
        named = [(parameter, kind, index), ("x", there[0], there[1])]
    elif found := _CACHED.search(text):
        name, kind, index, *parameter = found.groups()
        # A parameter first: it is the input that is to be moved.
        named = [(parameter[0], parameter[1], parameter[2]), (name, kind, index)]
    elif found := _INPUTS.search(text):
        listed = re.findall(_CONTEXT, found.group(1))
        named = [(f"input_{i}", kind, index) for i, (kind, index) in enumerate(listed)]
    elif found := _OPERATOR.search(text):
        operation, kind, index, number, other, where = found.groups()
        named = [("operand_0", kind, index), (f"operand_{int(number) - 1}", other, where)]
    operands: list[Operand] = []
    for name, kind, index in named:
        device = backend._from_native(mx.Context(kind, int(index)))
        if device is not None:
            operands.append((name, device))
    # Two contexts that are one device to d2ldev are MXNet's affair.
    is_mixed = len({device for _, device in operands}) > 1
    return mismatch(operation, operands) if is_mixed else None


def translating(backend: Backend) -> Iterator[Replacement]:
    """Calling a block, with MXNet's errors translated where they are raised."""
    yield mx.gluon.Block, "__call__", _calling(backend, vars(mx.gluon.Block)["__call__"])


def _calling(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any) -> Any:
        try:
            return function(self, *args)
        except DeviceMismatchError:
            raise
        except Exception as error:
            found = None
            if backend._strictness.in_force():
                found = translated(backend, error, type(self).__name__)
            if found is None:
                raise
            raise found from error

    return call
