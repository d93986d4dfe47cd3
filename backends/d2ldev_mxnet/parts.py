"""What a Gluon block, parameter, trainer and array keep, for ``place``.

More than ``reset_ctx`` moves: also gradients, the plain arrays and unregistered blocks of a block,
arrays with gradients that belong to no block, and the states of a trainer. An array with a
gradient stays the object it is and gets other memory, so that whoever else holds it still does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from d2ldev.errors import UnsupportedValueError
from d2ldev.operations.placing import Part
from d2ldev_mxnet.framework import NumPySemantics, mx
from d2ldev_mxnet.parameter_names import ranks

_Block, _Parameter = mx.gluon.Block, mx.gluon.Parameter
_ParameterDict, _Trainer = mx.gluon.ParameterDict, mx.gluon.Trainer
_Updater = mx.optimizer.Updater

OBJECT_TYPES: tuple[type, ...] = (_Block, _Parameter, _ParameterDict, _Trainer, _Updater)

# What every block has in its ``__dict__``: its parameters and children, which are read below,
# hooks, and the graph of a hybridized one. With a prefix, no name of MXNet's counting is used up.
_OWN_ATTRIBUTES = frozenset(vars(mx.gluon.HybridBlock(prefix="")))
# Most attributes are of these types, and hold no array.
_WITHOUT_ARRAYS = (bool, int, float, str, type(None), mx.Context)

_placing: ContextVar[Placing | None] = ContextVar("d2ldev_mxnet_placing", default=None)
# MXNet makes another object each time it is asked for a gradient: here it is the same one for as
# long as somebody holds it.
_gradients: WeakValueDictionary[int, Any] = WeakValueDictionary()
# The parameters by the ids of their arrays, whose gradients are the parameter's to list.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


class Placing:
    """One ``place``: what it met, to be told afterwards where it is now.

    A parameter remembers its contexts beside its arrays, also one that has none yet, and so does
    a trainer.
    """

    def __init__(self) -> None:
        self.met: list[Any] = []

    def __enter__(self) -> Placing:
        self._token = _placing.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _placing.reset(self._token)

    def settle(self, context: Any) -> None:
        """Tell all that everything it keeps is in ``context``. It must not fail."""
        for obj in self.met:
            if isinstance(obj, _Parameter):
                _settle_parameter(obj, context)
            elif isinstance(obj, _Trainer):
                _settle_trainer(obj, context)
            elif isinstance(obj, _Updater):
                _settle_updater(obj, context)


def parts_of(obj: Any) -> Iterator[Part]:
    """The parts of a block, a parameter, a dictionary of parameters, a trainer, or its updater."""
    placing = _placing.get()
    if placing is not None:
        placing.met.append(obj)
    if isinstance(obj, _Parameter):
        return _parameter_parts(obj, placing is not None)
    if isinstance(obj, _Block):
        return _block_parts(obj)
    if isinstance(obj, _ParameterDict):
        return (Part(name, parameter, _kept) for name, parameter in obj.items())
    return _trainer_parts(obj) if isinstance(obj, _Trainer) else _updater_parts(obj)


def _kept(_: Any) -> None:
    """Where an object is kept: it is moved in place, and never replaced."""


def _block_parts(block: Any) -> Iterator[Part]:
    for name, parameter in block._reg_params.items():
        yield Part(name, parameter, _kept)
    prefix = block._params.prefix  # with a number that counts on from model to model
    for name, parameter in block._params.items():  # also those without an attribute
        yield Part(f"params.{name.removeprefix(prefix)}", parameter, _kept)
    for name, child in block._children.items():
        yield Part(name, child, _kept)
    attributes = vars(block)
    for name, value in attributes.items():
        if name not in _OWN_ATTRIBUTES and not isinstance(value, _WITHOUT_ARRAYS):
            yield Part(name, value, partial(attributes.__setitem__, name))


def _parameter_parts(parameter: Any, is_moving: bool) -> Iterator[Part]:
    arrays = parameter._data or []
    if is_moving and len(arrays) > 1:
        raise UnsupportedValueError(
            f"place the parameter {parameter.name}",
            f"it is spread over {parameter._ctx_list}, and each of them may have its own values",
            "net.collect_params().reset_ctx(ctx) takes their mean, and forgets the gradients",
        )
    for i, array in enumerate(arrays):
        suffix = f".{i}" if i else ""
        _owners[id(array)] = parameter
        yield Part(f"data{suffix}", array, partial(arrays.__setitem__, i))
        if parameter._grad is not None:
            put = partial(_put_gradient, parameter, i, bool(array._fresh_grad))
            yield Part(f"grad{suffix}", parameter._grad[i], put)


def _put_gradient(parameter: Any, i: int, is_fresh: bool, gradient: Any) -> None:
    parameter._grad[i] = gradient
    _attach(parameter._data[i], gradient, parameter.grad_req, is_fresh)


def _attach(x: Any, gradient: Any, request: str, is_fresh: bool) -> None:
    mx.autograd.mark_variables([x], [gradient], request)
    x._fresh_grad = is_fresh


def _trainer_parts(trainer: Any) -> Iterator[Part]:
    for parameter in trainer._params:
        yield Part(f"params.{parameter.name}", parameter, _kept)
    for updater in trainer._updaters:
        yield from _updater_parts(updater)


def _updater_parts(updater: Any) -> Iterator[Part]:
    # By the age of their parameters: a trainer's own numbers are others for the next such model.
    named = ranks(updater.optimizer.param_dict)
    for index in sorted(updater.states, key=lambda index: named.get(index, index)):
        put = partial(updater.states.__setitem__, index)
        yield Part(f"states.{named.get(index, index)}", updater.states[index], put)


def _settle_parameter(parameter: Any, context: Any) -> None:
    if parameter._data is not None:
        parameter._ctx_list = [mx.Context(context)]
        # By the kind of device and its index, the number of the array: see ``_init_impl``.
        parameter._ctx_map = [[], []]
        parameter._ctx_map[context.device_typeid & 1] = [None] * context.device_id + [0]
    elif parameter._deferred_init:
        parameter.reset_ctx(mx.Context(context))
    trainer = parameter._trainer
    if trainer is not None:
        # Also one that was not placed itself: its states follow at its next step.
        for updater in trainer._updaters:
            updater.states_synced.update(dict.fromkeys(updater.states, False))
        _settle_trainer(trainer, context)


def _settle_trainer(trainer: Any, context: Any) -> None:
    trainer._contexts = [mx.Context(context)]
    for updater in trainer._updaters:
        _settle_updater(updater, context)


def _settle_updater(updater: Any, context: Any) -> None:
    # Optimizers count their steps for each index of a device, and would begin again.
    optimizer = updater.optimizer
    optimizer._all_index_update_counts[context.device_id] = optimizer._index_update_count


def attached_to(x: Any) -> Iterator[Part]:
    """The gradient of an array that is no parameter's."""
    owner = _owners.get(id(x))
    if owner is not None and any(array is x for array in owner._data or ()):
        return
    gradient = _gradient_of(x)
    if gradient is None:
        return
    # Another handle on the array as it is marked now, for when it has other memory.
    handle = mx.base.NDArrayHandle()
    mx.base.check_call(mx.base._LIB.MXShallowCopyNDArray(x.handle, ctypes.byref(handle)))
    yield Part("grad", gradient, partial(_reattach, x, type(x)(handle), gradient))


def _gradient_of(x: Any) -> Any:
    gradient = x.grad
    if gradient is None or not isinstance(gradient, mx.np.ndarray):
        return gradient  # no other class of MXNet's can be held weakly
    address = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(gradient.handle, ctypes.byref(address)))
    known = _gradients.get(address.value or 0)
    if known is None or known.shape != gradient.shape or known.dtype != gradient.dtype:
        _gradients[address.value or 0] = known = gradient
    return known


def _reattach(x: Any, before: Any, old: Any, new: Any) -> None:
    _attach(x, new, _request_of(before, old), bool(before._fresh_grad))


def _request_of(x: Any, gradient: Any) -> str:
    """Whether backward passes add to a gradient or overwrite it, which MXNet does not tell.

    It is tried out, with nothing to be added to ones. The gradient is that of an array whose
    memory is given up.
    """
    if not gradient.size:
        return "write"
    with NumPySemantics():
        gradient[()] = 1
        with mx.autograd.record():
            y = x * 1
        y.backward(mx.np.zeros_like(y) if isinstance(y, mx.np.ndarray) else mx.nd.zeros_like(y))
        return "add" if gradient.asnumpy().any() else "write"


def refill(x: Any, new: Any) -> None:
    """Give ``x`` the memory of ``new``, and ``new``, which nobody keeps, that of ``x``."""
    x.handle, new.handle = new.handle, x.handle
