"""Files: the layers of a Gluon sequence, and what a ``gluon.Trainer`` has learned.

Gluon's layouts are the canonical ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from d2ldev.errors import describe
from d2ldev.framework import Files, Layer, Tensor
from d2ldev_mxnet.framework import NumPyShapes, mx
from d2ldev_mxnet.models import NumPySequential, ranks

_nn = mx.gluon.nn
_SEQUENCES = (_nn.Sequential, _nn.HybridSequential, NumPySequential)
_CONVOLUTIONS = (_nn.Conv1D, _nn.Conv2D, _nn.Conv3D)
_FUNCTIONS = (_nn.Lambda, _nn.HybridLambda)


class MXNetFiles(Files):
    """MXNet's arrays, blocks and trainers in files."""

    def is_dense(self, x: Tensor) -> bool:
        return bool(x.stype == "default")

    # -- models -----------------------------------------------------------------------------------

    def layers(self, model: Any) -> list[Layer] | None:
        if type(model) not in _SEQUENCES:
            return None
        layers = []
        for layer in model._children.values():
            kind = type(layer)
            is_convolution = kind in _CONVOLUTIONS and layer._kwargs["layout"].startswith("NC")
            is_gluon_s = kind.__module__.startswith("mxnet.gluon.nn.")
            if is_convolution or kind is _nn.Dense:
                layers.append(Layer(_array(layer.weight), _array(layer.bias)))
            elif layer._children or kind in _FUNCTIONS or not is_gluon_s:
                return None  # it may change the order of what it is given
        return layers

    def complete(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        inputs: Any,
        undo: Callable[..., object],
    ) -> list[str]:
        lacking: list[str] = []
        if not isinstance(model, mx.gluon.Block):
            return lacking
        # Of NumPy's kind or the old one, as the first batch would make them.
        make = mx.np.zeros if mx.util.is_np_array() else mx.nd.zeros
        for name, parameter in _parameters(model):
            shape, mine = shapes.get(name), parameter.shape
            contexts = parameter._deferred_init[1] if parameter._deferred_init else [mx.cpu()]
            if parameter._data is not None:
                continue
            if shape is None:
                lacking.append(name)
            elif len(contexts) == 1 and len(mine or shape) == len(shape):
                # What is known of its shape stays, and is compared with the file.
                sizes = [i if i > 0 else j for i, j in zip(mine or shape, shape, strict=True)]
                undo(vars(parameter).update, dict(vars(parameter)))
                zeros = make(tuple(sizes), dtype=parameter.dtype, ctx=contexts[0])
                parameter._load_init(zeros, contexts[0])
        return lacking

    # -- optimizers -------------------------------------------------------------------------------

    def state(self, optimizer: Any) -> dict[str, Any] | None:
        """Return a trainer's numbers, counts and arrays, by the ranks of its parameters."""
        if not isinstance(optimizer, mx.gluon.Trainer):
            return None
        rank = _ranks(optimizer)
        states = optimizer._updaters[0].states
        return {
            **progress_of(optimizer),
            "states": {rank[i]: state for i, state in states.items()},
            "shapes": _shapes(optimizer),
        }

    def checked_state(self, optimizer: Any, state: Any) -> Callable[[], None]:
        updater = optimizer._updaters[0]
        if state["shapes"] != (mine := _shapes(optimizer)):
            raise ValueError(f"its shapes: {mine}, {state['shapes']} in the state")
        put_progress = checked_progress(optimizer, state)
        index_of = {rank: index for index, rank in _ranks(optimizer).items()}
        states = {
            index_of[name]: _state_like(optimizer, index_of[name], name, saved)
            for name, saved in state["states"].items()
        }

        def put() -> None:
            put_progress()
            updater.states = states
            updater.states_synced = dict.fromkeys(states, True)

        return put


def progress_of(trainer: Any) -> dict[str, Any]:
    """Return the class, the numbers, the schedule and the counts of updates of an optimizer."""
    own, rank = trainer.optimizer, _ranks(trainer)
    return {
        "class": type(own).__name__,
        "numbers": _numbers(own),
        "schedule": _numbers(own.lr_scheduler),
        "counts": {rank[i]: count for i, count in own._index_update_count.items()},
    }


def form_of(trainer: Any) -> list[Any]:
    """Return what two optimizers have in common where each takes the other's progress."""
    own = trainer.optimizer
    return [
        (type(obj).__name__, {name: _kind_of_number(x) for name, x in _numbers(obj).items()})
        for obj in (own, own.lr_scheduler)
    ]


def checked_progress(trainer: Any, progress: Mapping[str, Any]) -> Callable[[], None]:
    """Return a function that gives an optimizer what ``progress_of`` returned.

    Raises:
        ValueError: if it is another optimizer's.
    """
    own, mine = trainer.optimizer, progress_of(trainer)
    if progress["class"] != mine["class"]:
        raise ValueError(f"its class: {mine['class']}, {progress['class']} in the state")
    for what in ("numbers", "schedule"):
        _check_numbers(what, mine[what], progress[what])
    index_of = {rank: index for index, rank in _ranks(trainer).items()}
    for name, count in progress["counts"].items():
        if type(count) is not int or not 0 <= count < 2**63:
            raise ValueError(f"the steps of parameter {name} are {describe(count)}")
    counts = {index_of[name]: count for name, count in progress["counts"].items()}
    device_id = trainer._params[0].list_ctx()[0].device_id

    def put() -> None:
        vars(own).update(progress["numbers"])
        if own.lr_scheduler is not None:
            vars(own.lr_scheduler).update(progress["schedule"])
        # Counted for each index of a device, of which a new optimizer knows only the first.
        own._all_index_update_counts[device_id] = counts
        own._index_update_count = counts

    return put


def _parameters(block: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a block's parameters, each with the name of its array in ``Models.parts``.

    Gluon's own names are others where a layer keeps those of older files, such as ``LSTM``.
    """
    for name, parameter in block._reg_params.items():
        yield f"{prefix}{name}.data", parameter
    for name, child in block._children.items():
        yield from _parameters(child, f"{prefix}{name}.")


def _array(parameter: Any) -> Any:
    """Return the one array of a parameter; None if it has none yet, or several."""
    arrays = [] if parameter is None else parameter._data or []
    return arrays[0] if len(arrays) == 1 else None


def _ranks(trainer: Any) -> dict[int, str]:
    """Return the ranks of a trainer's parameters by their indices, in the order of the ranks."""
    found = ranks(dict(enumerate(trainer._params)))
    return {index: str(rank) for index, rank in found.items()}


def _shapes(trainer: Any) -> list[list[int]]:
    """Return the shapes of a trainer's parameters, in the order of their ranks."""
    return [list(trainer._params[i].shape or ()) for i in _ranks(trainer)]


def _numbers(obj: Any) -> dict[str, Any]:
    """Return the numbers of an optimizer or a schedule, which it may change as it goes."""
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in ({} if obj is None else vars(obj)).items()
        if _kind_of_number(value)
    }


def _kind_of_number(value: Any) -> type | None:
    """Return ``bool``, ``float`` for other numbers, ``list`` for several; None for all else."""
    if isinstance(value, (list, tuple)):
        return list if all(map(_kind_of_number, value)) else None
    if isinstance(value, bool):
        return bool
    return float if isinstance(value, (int, float)) else None


def _check_numbers(what: str, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if different := sorted(mine.keys() ^ saved.keys()):
        raise ValueError(f"its {what}: only one of the two has {different[0]}")
    for name, value in saved.items():
        if _kind_of_number(value) is not _kind_of_number(mine[name]):
            raise ValueError(f"its {what}: {name} is {describe(value)}")


def _state_like(trainer: Any, index: int, name: str, saved: Any) -> Any:
    """Return a state of a parameter with the saved values, where the parameter is.

    Raises:
        ValueError: if it has another form.
    """
    parameter = trainer._params[index]
    if parameter._data is None:
        raise ValueError(f"{parameter.name} has no array yet: call the model once")
    # As an updater makes it: of an array of the old kind.
    weight = parameter.data().as_nd_ndarray()
    made = trainer.optimizer.create_state_multi_precision(index, weight)
    arrays, values = list(_arrays(made)), list(_arrays(saved))
    expected, found = list(map(_form, arrays)), list(map(_form, values))
    if expected != found:
        raise ValueError(f"the state of parameter {name} is {expected}, and {found} in the state")
    with NumPyShapes():
        for new, value in zip(arrays, values, strict=True):
            value.as_nd_ndarray().copyto(new.as_nd_ndarray())
    return made


def _arrays(state: Any) -> Iterator[Any]:
    """Yield the arrays of an optimizer's state for one parameter: none, one, or a nesting."""
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _arrays(item)
    elif state is not None:
        yield state


def _form(x: Any) -> str:
    if not isinstance(x, mx.nd.NDArray):
        return describe(x)
    return f"{np.dtype(x.dtype).name} {tuple(x.shape)}"
