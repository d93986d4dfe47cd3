"""What the next step of an MXNet ``Learner`` depends on, as a nesting, and back.

Everything goes by the names of the parameters in the model (``'0.weight'``), as in
``Block.save_parameters``: MXNet's own names count on from model to model, and a trainer has only
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from d2ldev.errors import describe
from d2ldev.training.learner import refused_state
from d2ldev_mxnet.framework import NumPySemantics, mx

State = Mapping[str, Any]

_REQUESTS = ("null", "write", "add")
# What is drawn here. ``mx.random.seed`` takes the low 32 bits of any number without a word.
_SEEDS = range(2**31 - 1)


def named_parameters(model: Any, trainer: Any) -> dict[str, Any]:
    """The parameters of a model, and those of a trainer that are not in it, by name."""
    structural = {id(p): name for name, p in model._collect_params_with_prefix().items()}
    every = {id(p): p for p in (*model.collect_params().values(), *trainer._params)}
    return {structural.get(key, p.name.removeprefix(model.prefix)): p for key, p in every.items()}


def state_of(model: Any, trainer: Any) -> dict[str, Any]:
    """The model, how it has gradients, and the optimizer; what has no shape yet is ``None``."""
    named = named_parameters(model, trainer)
    names = {id(p): name for name, p in named.items()}
    by_index = {index: names[id(p)] for index, p in enumerate(trainer._params)}
    optimizer, updater = trainer.optimizer, trainer._updaters[0]
    counts = optimizer._index_update_count
    return {
        "model": {name: None if p._data is None else p.data() for name, p in named.items()},
        "gradients": {name: p.grad_req for name, p in named.items()},
        "optimizer": {
            "class": type(optimizer).__name__,
            "parameters": list(by_index.values()),
            "numbers": _numbers(optimizer),
            "schedule": _numbers(optimizer.lr_scheduler),
            "counts": {by_index[index]: count for index, count in counts.items()},
            "states": {by_index[index]: state for index, state in updater.states.items()},
        },
    }


def _numbers(obj: Any) -> dict[str, Any]:
    """What an optimizer or a schedule computes with, and may change as it goes."""
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in vars(obj or object).items()
        if not name.startswith("__") and _is_number(value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_number(item) for item in value)
    return isinstance(value, (bool, int, float))


class Restoration:
    """A saved state next to a model and a trainer, checked.

    Args:
        model, trainer: what is to have the state; not changed yet.
        saved: the state.

    Raises:
        CheckpointError: if it is of another model or optimizer.
    """

    def __init__(self, model: Any, trainer: Any, saved: State) -> None:
        self._trainer = trainer
        self._parameters = named_parameters(model, trainer)
        self._model, self._gradients = saved["model"], saved["gradients"]
        self._optimizer = saved["optimizer"]
        current = state_of(model, trainer)
        for part in ("model", "gradients", "optimizer"):
            value = saved[part]
            if not isinstance(value, Mapping):
                raise refused_state(part, f"{describe(value)} is no dict")
            different = sorted(current[part].keys() ^ value.keys(), key=str)
            if different:
                raise refused_state(part, f"only one of the two has {different[0]}")
        for name, parameter in self._parameters.items():
            _check(name, parameter, self._model[name])
            if self._gradients[name] not in _REQUESTS:
                raise refused_state(
                    "model", f"the gradient of {name}: {describe(self._gradients[name])}"
                )
        for key in ("class", "parameters"):
            here, there = current["optimizer"][key], self._optimizer[key]
            if here != there:
                raise refused_state("optimizer", f"its {key}: {here}, {there} in the state")
        self._states = {name: list(_arrays(x)) for name, x in self._optimizer["states"].items()}
        for name, arrays in self._states.items():
            self._check_states(name, arrays)

    def _check_states(self, name: str, arrays: list[Any]) -> None:
        parameter = self._parameters.get(name)
        if parameter is None:
            raise refused_state("optimizer", f"the model has no {name}")
        if parameter._data is None:
            return
        expected = [_form(x) for x in _arrays(self._made(parameter))]
        found = [_form(x) for x in arrays]
        if expected != found:
            raise refused_state("optimizer", f"{name} has {expected}, and {found} in the state")

    def _made(self, parameter: Any) -> Any:
        """A new state of the optimizer for a parameter."""
        index = self._trainer._param2idx[parameter.name]
        # As an updater makes it: of an array of the old kind.
        weight = parameter.data().as_nd_ndarray()
        return self._trainer.optimizer.create_state_multi_precision(index, weight)

    def carry_out(self) -> None:
        """Give the model and the trainer the state."""
        with NumPySemantics():
            for name, parameter in self._parameters.items():
                if parameter.grad_req != self._gradients[name]:
                    parameter.grad_req = self._gradients[name]
                self._fill(parameter, self._model[name])
            self._restore_optimizer()

    def _fill(self, parameter: Any, value: Any) -> None:
        if value is None:
            return
        if parameter._data is None:
            parameter.set_data(value)
            parameter._finish_deferred_init()
        else:
            value.copyto(parameter.data())

    def _restore_optimizer(self) -> None:
        trainer, saved = self._trainer, self._optimizer
        optimizer, updater = trainer.optimizer, trainer._updaters[0]
        vars(optimizer).update(saved["numbers"])
        if optimizer.lr_scheduler is not None:
            vars(optimizer.lr_scheduler).update(saved["schedule"])
        updater.states.clear()
        updater.states_synced.clear()
        for name, arrays in self._states.items():
            parameter = self._parameters[name]
            index = trainer._param2idx[parameter.name]
            made = self._made(parameter)
            for new, value in zip(_arrays(made), arrays, strict=True):
                value.as_nd_ndarray().copyto(new.as_nd_ndarray())
            updater.states[index], updater.states_synced[index] = made, True
        # Counted for each index of a device, of which a new optimizer knows only the first.
        counts = {
            trainer._param2idx[self._parameters[name].name]: count
            for name, count in saved["counts"].items()
        }
        device_id = trainer._params[0].list_ctx()[0].device_id
        optimizer._all_index_update_counts[device_id] = counts
        optimizer._index_update_count = counts


def _check(name: str, parameter: Any, value: Any) -> None:
    is_known = parameter._data is not None
    if value is None:
        if is_known:
            raise refused_state(
                "model", f"{name} is {_form(parameter.data())}, and unknown in the state"
            )
        return
    found, shape = _form(value), parameter.shape
    if is_known and found != _form(parameter.data()):
        raise refused_state(
            "model", f"{name} is {_form(parameter.data())}, and {found} in the state"
        )
    is_alike = len(shape) == len(value.shape) and all(
        n <= 0 or n == m for n, m in zip(shape, value.shape, strict=True)
    )
    if not is_alike:
        raise refused_state("model", f"{name} is of shape {shape}, and {found} in the state")


def _arrays(state: Any) -> Iterator[Any]:
    """The arrays of an optimizer's state for one parameter: none, one, or a nesting of them."""
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _arrays(item)
    elif state is not None:
        yield state


def _form(x: Any) -> str:
    if not isinstance(x, mx.nd.NDArray):
        return describe(x)
    return f"{np.dtype(x.dtype).name} {tuple(x.shape)}"


def random_state() -> int:
    """The state of the random numbers from here on.

    MXNet's generators cannot be read. So they are given a new seed, which is drawn from them: a
    run that goes on from here and one that is continued from here draw the same, and so does the
    whole run when it is repeated.
    """
    with NumPySemantics():
        seed = int(mx.np.random.randint(_SEEDS.start, _SEEDS.stop))
    mx.random.seed(seed)
    return seed


def check_random_state(saved: Any) -> None:
    """See that a state is one of the generators.

    Raises:
        CheckpointError: if it is not.
    """
    if type(saved) is not int or saved not in _SEEDS:
        raise refused_state("generator", f"{describe(saved)} is no state of one")
