"""Files: the layers of a Gluon sequence, and the state of a ``gluon.Trainer``.

Gluon's layouts are the canonical ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from d2ldev.framework import SPARSE, Files, Layer, Tensor, describe
from d2ldev_mxnet.framework import NumPyShapes, mx
from d2ldev_mxnet.models import NumPySequential, attributes_of, optimizers_of, ranks

_nn = mx.gluon.nn
_SEQUENCES = (_nn.Sequential, _nn.HybridSequential, NumPySequential)
_CONVOLUTIONS = (_nn.Conv1D, _nn.Conv2D, _nn.Conv3D)
_FUNCTIONS = (_nn.Lambda, _nn.HybridLambda)


class MXNetFiles(Files):
    """MXNet's arrays, blocks and trainers in files."""

    def borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        if x.stype != "default":
            raise ValueError(SPARSE)
        if x.ctx.device_type == "gpu" or np.dtype(x.dtype) == bool:  # in no capsule of MXNet's
            return super().borrow(x)
        try:
            return np.from_dlpack(self.tensors.dlpack_of(x))  # without a copy
        except mx.base.MXNetError:  # a kernel in oneDNN's own order, which no capsule describes
            return super().borrow(x)

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
                return None  # it may change the order of the columns
        return layers

    def complete(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        undo: Callable[..., object],
        *,
        is_strict: bool,
    ) -> tuple[Collection[str], Collection[str]]:
        lacking: list[str] = []
        if not isinstance(model, mx.gluon.Block):
            return lacking, ()
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
                # The known lengths of its shape stay, and are compared with the file.
                sizes = [i if i > 0 else j for i, j in zip(mine or shape, shape, strict=True)]
                undo(vars(parameter).update, dict(vars(parameter)))
                zeros = make(tuple(sizes), dtype=parameter.dtype, ctx=contexts[0])
                parameter._load_init(zeros, contexts[0])
        return lacking, ()

    # -- optimizers -------------------------------------------------------------------------------

    def state(self, optimizer: Any) -> dict[str, Any] | None:
        """Return a trainer's numbers, counts and arrays, by the ranks of its parameters."""
        if not isinstance(optimizer, mx.gluon.Trainer):
            return None
        rank = _ranks(optimizer)
        states = optimizer._updaters[0].states
        kept = {
            each.name: {
                "values": _rank(each.value, rank),
                "is_of_numpy": _is_of_numpy(each.value),
            }
            for each in attributes_of(optimizer)
            if any(isinstance(x, mx.nd.NDArray) for x in _arrays(each.value))
        }
        return {
            **progress_of(optimizer),
            "states": {rank[i]: state for i, state in states.items()},
            "shapes": _shapes(optimizer),
            **({"attributes": kept} if kept else {}),
        }

    def list_parameters(self, optimizer: Any) -> list[tuple[str, Any]]:
        if not isinstance(optimizer, mx.gluon.Trainer):
            return []
        return [("", _array(optimizer._params[index])) for index in _ranks(optimizer)]

    def prepare_state(
        self, optimizer: Any, state: Any, order: Sequence[int] | None = None
    ) -> Callable[[], None]:
        updater = optimizer._updaters[0]
        rank = _ranks(optimizer, order)
        mine = dict(zip(map(int, rank.values()), _shapes(optimizer), strict=True))
        if state["shapes"] != [mine[number] for number in sorted(mine)]:
            raise ValueError(f"its shapes: {_shapes(optimizer)}, {state['shapes']} in the state")
        if rank != _ranks(optimizer) and "attributes" in state:
            raise ValueError(
                "it has the parameters in another order, and attributes that may belong to several"
            )
        put_progress = check_progress(optimizer, state, rank)
        index_of = {name: index for index, name in rank.items()}
        states = {
            index_of[name]: _state_like(optimizer, index_of[name], name, saved)
            for name, saved in state["states"].items()
        }
        # The optimizer has made the states, and may have made further attributes with them.
        puts = _attributes_put(optimizer, state.get("attributes", {}), index_of)

        def put() -> None:
            put_progress()
            updater.states = states
            updater.states_synced = dict.fromkeys(states, True)
            for each in puts:
                each()

        return put


def progress_of(trainer: Any) -> dict[str, Any]:
    """Return the class, the numbers, the schedule and the counts of updates of an optimizer.

    Those of the optimizers that it is around are in ``inner``, if it is around others.
    """
    rank = _ranks(trainer)
    (_, own), *others = optimizers_of(trainer)
    inner = {prefix: _progress(each, rank) for prefix, each in others}
    return {**_progress(own, rank), **({"inner": inner} if inner else {})}


def _progress(own: Any, rank: Mapping[int, str]) -> dict[str, Any]:
    return {
        "class": type(own).__name__,
        "numbers": _numbers(own),
        "schedule": _numbers(own.lr_scheduler),
        "counts": {rank[i]: count for i, count in own._index_update_count.items()},
    }


def form_of(trainer: Any) -> list[Any]:
    """Return a key that two optimizers share if each can take the other's progress."""
    own = trainer.optimizer
    return [
        (type(obj).__name__, {name: _kind_of_number(x) for name, x in _numbers(obj).items()})
        for obj in (own, own.lr_scheduler)
    ]


def check_progress(
    trainer: Any, progress: Mapping[str, Any], rank: Mapping[int, str] | None = None
) -> Callable[[], None]:
    """Return a function that gives an optimizer what ``progress_of`` returned.

    Args:
        trainer: whose optimizer it is.
        progress: what ``progress_of`` returned.
        rank: the ranks of the trainer's parameters there, by their indices. None means that they
            are the same here.

    Raises:
        ValueError: if it is another optimizer's.
    """
    (_, own), *others = optimizers_of(trainer)
    inner, rank = progress.get("inner", {}), rank or _ranks(trainer)
    if inner.keys() != {prefix for prefix, _ in others}:
        raise ValueError(f"it is around {sorted(inner)} in the state")
    progresses = [(own, progress), *((each, inner[prefix]) for prefix, each in others)]
    index_of = {name: index for index, name in rank.items()}
    device_id = trainer._params[0].list_ctx()[0].device_id
    puts = [_progress_put(each, saved, rank, index_of, device_id) for each, saved in progresses]

    def put() -> None:
        for each in puts:
            each()

    return put


def _progress_put(
    own: Any,
    progress: Mapping[str, Any],
    rank: Mapping[int, str],
    index_of: Mapping[str, int],
    device_id: int,
) -> Callable[[], None]:
    mine = _progress(own, rank)
    if progress["class"] != mine["class"]:
        raise ValueError(f"its class: {mine['class']}, {progress['class']} in the state")
    for what in ("numbers", "schedule"):
        _check_numbers(what, mine[what], progress[what])
    for name, count in progress["counts"].items():
        if type(count) is not int or not 0 <= count < 2**63:
            raise ValueError(f"the steps of parameter {name} are {describe(count)}")
    counts = {index_of[name]: count for name, count in progress["counts"].items()}

    def put() -> None:
        vars(own).update(progress["numbers"])
        if own.lr_scheduler is not None:
            vars(own.lr_scheduler).update(progress["schedule"])
        # The counts for each index of a device. A new optimizer knows only the first device.
        own._all_index_update_counts[device_id] = counts
        own._index_update_count = counts

    return put


def _attributes_put(
    trainer: Any, saved: Mapping[str, Any], index_of: Mapping[str, int]
) -> list[Callable[[], object]]:
    """Return functions that give a trainer and its optimizers what they keep beside the states."""
    holders = {"": trainer, **dict(optimizers_of(trainer))}
    context = trainer._params[0].list_ctx()[0]
    puts: list[Callable[[], object]] = []
    for name, told in saved.items():
        prefix, _, label = name.rpartition(".")
        attributes = vars(holders[f"{prefix}." if prefix else ""])
        if label not in attributes:
            raise ValueError(f"its {name}, which is not there yet")
        now = attributes[label]
        new = _place(told["values"], context, index_of, is_of_numpy=told["is_of_numpy"])
        if isinstance(now, (dict, list)) and isinstance(new, type(now)):
            # Other owners of the object get the value, too.
            puts += [now.clear, partial(now.update if isinstance(now, dict) else now.extend, new)]
        else:
            puts.append(partial(attributes.__setitem__, label, new))
    return puts


# A dict in a state whose keys are the ranks of parameters, and not their indices.
_BY_RANK = "by rank of the parameter"


def _rank(value: Any, rank: Mapping[int, str]) -> Any:
    """Return a nesting with the ranks of parameters in place of their indices."""
    if isinstance(value, Mapping):
        items = {key: _rank(x, rank) for key, x in value.items()}
        is_by_index = bool(items) and all(type(key) is int and key in rank for key in items)
        return {_BY_RANK: {rank[key]: x for key, x in items.items()}} if is_by_index else items
    if isinstance(value, (list, tuple)):
        return [_rank(x, rank) for x in value]
    return value


def _place(value: Any, context: Any, index_of: Mapping[str, int], *, is_of_numpy: bool) -> Any:
    """Return such a nesting with indices, and with its arrays on a context."""
    again = partial(_place, context=context, index_of=index_of, is_of_numpy=is_of_numpy)
    if isinstance(value, Mapping):
        if value.keys() == {_BY_RANK}:
            return {index_of[name]: again(x) for name, x in value[_BY_RANK].items()}
        return {key: again(x) for key, x in value.items()}
    if isinstance(value, list):
        return [again(x) for x in value]
    if isinstance(value, mx.nd.NDArray):
        with NumPyShapes():
            x = value.as_nd_ndarray().as_in_context(context)
        return x.as_np_ndarray() if is_of_numpy else x.as_nd_ndarray()
    return value


def _is_of_numpy(value: Any) -> bool:
    return any(isinstance(x, mx.np.ndarray) for x in _arrays(value))


def _parameters(block: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a block's parameters, each with the name of its array in ``Models.members``.

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


def _ranks(trainer: Any, order: Sequence[int] | None = None) -> dict[int, str]:
    """Return the ranks of a trainer's parameters by their indices, in the order of the ranks.

    Args:
        trainer: whose parameters they are.
        order: the ranks in a state, for the parameters of each rank here.
    """
    found = ranks(dict(enumerate(trainer._params)))
    return {index: str(order[rank] if order else rank) for index, rank in found.items()}


def _shapes(trainer: Any) -> list[list[int]]:
    """Return the shapes of a trainer's parameters, in the order of their ranks."""
    return [list(trainer._params[i].shape or ()) for i in _ranks(trainer)]


def _numbers(obj: Any) -> dict[str, Any]:
    """Return the numbers of an optimizer or a schedule, which its updates may change."""
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
    try:
        with NumPyShapes():
            return _fill(made, saved)
    except (LookupError, ValueError) as error:
        raise ValueError(f"the state of parameter {name} does not fit: {error}") from error


def _fill(made: Any, saved: Any) -> Any:
    """Return an optimizer's state with the values of another state of the same form."""
    if isinstance(made, mx.nd.NDArray):
        if _form(made) != _form(saved):
            raise ValueError(f"it is {_form(made)}, and {_form(saved)} in the state")
        saved.as_nd_ndarray().copyto(made.as_nd_ndarray())
        return made
    if isinstance(made, dict) and isinstance(saved, dict) and made.keys() == saved.keys():
        return {key: _fill(x, saved[key]) for key, x in made.items()}
    if isinstance(made, (list, tuple)) and isinstance(saved, (list, tuple)):
        return type(made)(_fill(*pair) for pair in zip(made, saved, strict=True))
    if made is saved is None or (_kind_of_number(made) and _kind_of_number(saved)):
        return saved
    raise ValueError(f"it is {_form(made)}, and {_form(saved)} in the state")


def _arrays(state: Any) -> Iterator[Any]:
    """Yield the leaves of a nesting, without None."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _arrays(item)
    elif state is not None:
        yield state


def _form(x: Any) -> str:
    if not isinstance(x, mx.nd.NDArray):
        return describe(x)
    return f"{np.dtype(x.dtype).name} {tuple(x.shape)}"
