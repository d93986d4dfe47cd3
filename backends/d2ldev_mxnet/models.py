"""Models: the arrays of Gluon's blocks, parameters and trainers, and arrays with gradients.

``place`` moves more than ``reset_ctx``: gradients, a block's plain arrays and its unregistered
blocks, and the states of a trainer. It also moves arrays with gradients outside of blocks. An array
with a gradient stays the same object, and gets other memory. So its other owners see the move.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import Devices, Models, NoTensor, Role, Slot, Tensor
from d2ldev_mxnet.framework import NumPySemantics, NumPyShapes, mx
from d2ldev_mxnet.tensors import address_of

_Block, _Parameter = mx.gluon.Block, mx.gluon.Parameter
_ParameterDict, _Trainer = mx.gluon.ParameterDict, mx.gluon.Trainer
_nn = mx.gluon.nn
_library = mx.base._LIB

# The attributes of every block: parameters and children, which ``members`` lists itself, hooks, and
# the graph of a hybridized block. A block with a prefix does not advance MXNet's counter of names.
_OWN_ATTRIBUTES = frozenset(vars(mx.gluon.HybridBlock(prefix="")))
_OWN_OF_OPTIMIZERS = frozenset(vars(mx.optimizer.SGD()))
# Most attributes have these types, which hold no array.
_WITHOUT_ARRAYS = (bool, int, float, str, type(None))

_is_placing: ContextVar[bool] = ContextVar("d2ldev_mxnet_is_placing", default=False)


class MXNetModels(Models):
    """Blocks, parameters, and trainers."""

    types = (_Block, _Parameter, _ParameterDict, _Trainer)

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        # MXNet makes a new object at each access to a gradient. This table finds the former object
        # by its address, while a reference to it exists.
        self._gradients: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # The parameters by the ids of their arrays. A parameter lists its gradients itself.
        self._owners: WeakValueDictionary[int, Any] = WeakValueDictionary()

    # -- making -----------------------------------------------------------------------------------

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Any:
        net = NumPySequential()
        for number, (weight, bias) in enumerate(layers, 1):
            n_out, n_in = weight.shape
            between = activation if number < len(layers) else None
            dense = _nn.Dense(n_out, activation=between, flatten=False, in_units=n_in)
            initialise(dense.weight, weight)
            initialise(dense.bias, bias)
            net.add(dense)
        return net

    # -- placing ----------------------------------------------------------------------------------

    def members(self, obj: Any) -> Iterator[Slot]:
        if isinstance(obj, _Parameter):
            return self._members_of_parameter(obj)
        if isinstance(obj, _Block):
            return _members_of_block(obj)
        if isinstance(obj, _ParameterDict):
            return (Slot(name, parameter, role=Role.VARIABLE) for name, parameter in obj.items())
        return _members_of_trainer(obj)

    def _members_of_parameter(self, parameter: Any) -> Iterator[Slot]:
        arrays = parameter._data or []
        if len(arrays) > 1 and _is_placing.get():
            raise UnsupportedValueError(
                f"place the parameter {parameter.name}",
                f"it is spread over {parameter._ctx_list}, and each may have its own values",
                "net.collect_params().reset_ctx(ctx) takes their mean, and forgets the gradients",
            )
        if not arrays:
            yield Slot("data", _explain_missing_array(parameter))
        # A running mean is a parameter without a derivative.
        role = Role.PARAMETER if parameter._differentiable else Role.BUFFER
        is_trained = parameter._differentiable and parameter.grad_req != "null"
        for i, array in enumerate(arrays):
            suffix = f".{i}" if i else ""
            self._owners[id(array)] = parameter
            yield Slot(f"data{suffix}", array, partial(arrays.__setitem__, i), role, is_trained)

    def list_attached(self, x: Tensor) -> Iterator[Slot]:
        gradient = self._gradient_of(x)
        if gradient is None:
            return
        # A second handle on the array with its current mark, for the time after the move.
        handle = mx.base.NDArrayHandle()
        mx.base.check_call(_library.MXShallowCopyNDArray(x.handle, ctypes.byref(handle)))
        put = partial(self._reattach, x, type(x)(handle), gradient)
        yield Slot("grad", gradient, put, Role.WORKING)

    def _reattach(self, x: Any, before: Any, old: Any, new: Any) -> None:
        """Give an array, which has other memory than ``before``, its gradient there."""
        owner = self._owners.get(id(x))
        if owner is not None and owner._data and owner._data[0] is x:
            owner._grad[0], request = new, owner.grad_req
        else:
            request = _request_of(before, old)
        mx.autograd.mark_variables([x], [new], request)
        x._fresh_grad = bool(before._fresh_grad)

    def _gradient_of(self, x: Any) -> Any:
        gradient = x.grad
        if gradient is None or not isinstance(gradient, mx.np.ndarray):
            return gradient  # MXNet's other classes have no weak references
        address = address_of(gradient)
        known = self._gradients.get(address)
        if known is None or known.shape != gradient.shape or known.dtype != gradient.dtype:
            self._gradients[address] = known = gradient
        return known

    def find_refill(self, x: Tensor) -> Callable[[Tensor], object] | None:
        return None if x.grad is None else partial(_swap_memory, x)

    def plan_writes(
        self, values: Sequence[tuple[Tensor, Tensor, bool]]
    ) -> list[Callable[[], object] | None]:
        # The memory has the mark of a gradient, and stays.
        return [None if x.grad is None else partial(_write, x, new) for x, new, _ in values]

    @contextmanager
    def place_context(self, device: Device) -> Iterator[None]:
        token = _is_placing.set(True)
        try:
            with mx.autograd.pause():  # autograd must not record the move
                yield
        finally:
            _is_placing.reset(token)

    def settle(self, obj: Any, device: Device) -> None:
        # Parameters, also one that has no array yet, and trainers remember their contexts.
        context = self._devices.native(device)
        if isinstance(obj, _Parameter):
            _settle_parameter(obj, context)
        elif isinstance(obj, _Trainer):
            _settle_trainer(obj, context)


class NumPyBlock(mx.gluon.Block):
    """A block that is called with NumPy arrays, also without ``npx.set_np()``."""

    def __call__(self, *args: Any) -> Any:
        with NumPySemantics():
            return super().__call__(*args)


class NumPySequential(NumPyBlock, mx.gluon.nn.HybridSequential):
    """Layers, one after the other, that are called with NumPy arrays."""


def _swap_memory(x: Tensor, new: Tensor) -> None:
    x.handle, new.handle = new.handle, x.handle


def _write(x: Tensor, new: Tensor) -> None:
    if new.size:
        with NumPyShapes(), mx.autograd.pause():
            new.as_nd_ndarray().copyto(x.as_nd_ndarray())


def initialise(parameter: Any, values: Any) -> None:
    """Give a parameter its values, on the device of the values.

    This is how MXNet loads parameters. An initialiser would fill an array of the CPU, mostly with
    numbers from MXNet's random state, and copy it.
    """
    with NumPySemantics():
        parameter._load_init(values, values.ctx)


def ranks(parameters: Mapping[Any, Any]) -> dict[Any, int]:
    """Return the place of each of an optimizer's parameters in an order: key -> rank.

    It is the same for the next such model, and in another process. MXNet's names count on from
    model to model, and a ``gluon.Trainer`` sorts them as text, ``dense10_bias`` before
    ``dense9_bias``. Here their numbers are numbers.
    """

    def split_name(key: Any) -> list[Any]:
        found = re.split(r"(\d+)", parameters[key].name)
        return [int(segment) if segment.isdecimal() else segment for segment in found]

    return {key: rank for rank, key in enumerate(sorted(parameters, key=split_name))}


def _members_of_block(block: Any) -> Iterator[Slot]:
    for name, parameter in block._reg_params.items():
        yield Slot(name, parameter, role=Role.VARIABLE)
    prefix = block._params.prefix  # with a number that counts on from model to model
    for name, parameter in block._params.items():  # also those without an attribute
        yield Slot(f"params.{name.removeprefix(prefix)}", parameter, role=Role.VARIABLE)
    for name, child in block._children.items():
        yield Slot(name, child)
    attributes = vars(block)
    for name, value in attributes.items():
        if name not in _OWN_ATTRIBUTES and not isinstance(value, _WITHOUT_ARRAYS):
            put = partial(attributes.__setitem__, name)
            yield Slot(name, value, put, Role.ATTRIBUTE, is_saved=False)


def _members_of_trainer(trainer: Any) -> Iterator[Slot]:
    for parameter in trainer._params:
        yield Slot(f"params.{parameter.name}", parameter, role=Role.VARIABLE)
    for updater in trainer._updaters:
        named = ranks(updater.optimizer.param_dict)
        for index in sorted(updater.states, key=lambda index: named.get(index, index)):
            name = f"states.{named.get(index, index)}"
            yield Slot(name, updater.states[index], partial(updater.states.__setitem__, index))
    yield from attributes_of(trainer)


def attributes_of(trainer: Any) -> Iterator[Slot]:
    """Yield the further attributes of the user's own class of a trainer or an optimizer."""
    for prefix, holder, own in (
        ("", trainer, frozenset(name for name in vars(trainer) if name.startswith("_"))),
        *((prefix, each, _OWN_OF_OPTIMIZERS) for prefix, each in optimizers_of(trainer)),
    ):
        attributes = vars(holder)
        for name, value in attributes.items():
            is_inner = isinstance(value, mx.optimizer.Optimizer)
            if name not in own and not is_inner and not isinstance(value, _WITHOUT_ARRAYS):
                yield Slot(f"{prefix}{name}", value, partial(attributes.__setitem__, name))


def optimizers_of(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield a trainer's optimizer and the optimizers inside it, each with its prefix of names."""
    waiting = [("optimizer.", trainer.optimizer)]
    for prefix, optimizer in waiting:
        yield prefix, optimizer
        for name, value in vars(optimizer).items():
            is_new = all(value is not known for _, known in waiting)
            if isinstance(value, mx.optimizer.Optimizer) and is_new:
                waiting.append((f"{prefix}{name}.", value))


def _request_of(x: Any, gradient: Any) -> str:
    """Return whether backward passes add to a gradient or overwrite it, which MXNet does not tell.

    It is tried out by a backward pass of zeros into ones. The gradient is that of an array whose
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


def _explain_missing_array(parameter: Any) -> NoTensor:
    """Return why a parameter has no array."""
    if parameter._deferred_init:
        problem = "is not initialised before the first batch, by which MXNet knows its shape"
        return NoTensor(problem, "net(X), with one batch", is_made_there=True)
    return NoTensor(
        "is not initialised", "net.initialize(ctx=backend.native(device)), before anything else"
    )


def keep_on(parameter: Any, contexts: list[Any]) -> None:
    """Let a parameter know on which contexts its arrays are, in their order."""
    parameter._ctx_list = list(contexts)
    # By the kind of device and its index, the number of the array: see ``_init_impl``.
    parameter._ctx_map = [[], []]
    for number, context in enumerate(contexts):
        numbers = parameter._ctx_map[context.device_typeid & 1]
        numbers.extend([None] * (context.device_id + 1 - len(numbers)))
        numbers[context.device_id] = number


def _settle_parameter(parameter: Any, context: Any) -> None:
    """Let a parameter and its ``Trainer`` know that its arrays are on a context now."""
    if parameter._data is not None:
        keep_on(parameter, [mx.Context(context)])
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
        # Optimizers count their steps for each index of a device, and would begin again at 0.
        optimizer = updater.optimizer
        optimizer._all_index_update_counts[context.device_id] = optimizer._index_update_count
