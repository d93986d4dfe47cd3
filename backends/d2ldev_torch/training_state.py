"""What the next step of a torch ``Learner`` depends on, as a nesting, and back.

The model and the optimizer by their own ``state_dict``; for each of the optimizer's parameters
its name in the model, because the state itself has only numbers; which parameters are frozen, and
which modules are in evaluation mode within a model that is trained, as a callback may have done;
and the generators from which dropout draws.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from d2ldev.errors import describe
from d2ldev.interface import Tensor
from d2ldev.training.learner import refused_state

State = Mapping[str, Any]


def state_of_model(model: torch.nn.Module) -> dict[str, Any]:
    """Its parameters and buffers by name; of a lazy one that has no shape yet, ``None``."""
    return {
        name: None if torch.nn.parameter.is_lazy(value) else value
        for name, value in model.state_dict().items()
    }


def state_of_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Its class, the names of its parameters, and its ``state_dict``."""
    return {
        "class": type(optimizer).__name__,
        "parameters": _parameter_names(optimizer, model),
        **optimizer.state_dict(),
    }


def _parameter_names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def check_model(model: torch.nn.Module, saved: Any) -> None:
    """See that a state is one of this model.

    Raises:
        CheckpointError: if a name, a shape or a dtype differs.
    """
    current = state_of_model(model)
    if not isinstance(saved, Mapping):
        raise refused_state("model", f"{describe(saved)} is no dict of tensors")
    different = sorted(current.keys() ^ saved.keys(), key=str)
    if different:
        raise refused_state("model", f"only one of the two has {different[0]}")
    for name, x in current.items():
        if x is not None and _form(x) != _form(saved[name]):
            raise refused_state(
                "model", f"{name} is {_form(x)}, and {_form(saved[name])} in the state"
            )


def frozen_in(model: torch.nn.Module) -> list[str]:
    """The names of the parameters without ``requires_grad``."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def check_frozen(model: torch.nn.Module, saved: Any) -> None:
    """See that a state names parameters of this model.

    Raises:
        CheckpointError: if it does not.
    """
    if not _are_among(saved, (name for name, _ in model.named_parameters())):
        raise refused_state("model", f"what is frozen is {describe(saved)}")


def check_evaluation(model: torch.nn.Module, saved: Any) -> None:
    """See that a state names modules in this model.

    Raises:
        CheckpointError: if it does not.
    """
    # Not the model itself, which is trained.
    if not _are_among(saved, (name for name, _ in model.named_modules() if name)):
        raise refused_state("model", f"what is in evaluation mode is {describe(saved)}")


def _are_among(saved: Any, names: Iterable[str]) -> bool:
    is_list = isinstance(saved, list) and all(isinstance(name, str) for name in saved)
    return is_list and {*saved} <= {*names}


def freeze(model: torch.nn.Module, names: Collection[str]) -> None:
    """Freeze these parameters, and no others."""
    for name, parameter in model.named_parameters():
        # Not by ``requires_grad_``, which a parameter without a shape refuses.
        parameter.requires_grad = name not in names


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, saved: Any) -> None:
    """See that a state is one of this optimizer, of the same parameters in the same order.

    Raises:
        CheckpointError: if it is not.
    """
    current = state_of_optimizer(optimizer, model)
    if not isinstance(saved, Mapping) or current.keys() != saved.keys():
        raise refused_state("optimizer", f"{describe(saved)} is no state of one")
    for key in ("class", "parameters"):
        if current[key] != saved[key]:
            raise refused_state(
                "optimizer", f"its {key}: {current[key]}, {saved[key]} in the state"
            )
    if _settings(current["param_groups"]) != _settings(saved["param_groups"]):
        raise refused_state("optimizer", "its groups have other settings")
    kept = saved["state"]
    if not isinstance(kept, Mapping) or not all(isinstance(x, Mapping) for x in kept.values()):
        raise refused_state(
            "optimizer", f"{describe(kept)} is not what it keeps for its parameters"
        )


def _settings(groups: Any) -> Any:
    """The names of the settings of each group, and the numbers of its parameters."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        return None
    return [(sorted(map(str, group)), list(group.get("params", ()))) for group in groups]


def check_random_state(saved: Any, device: torch.device) -> None:
    """See that a state is one of these generators.

    Raises:
        CheckpointError: if it is not.
    """
    if not isinstance(saved, Mapping) or "cpu" not in saved:
        raise refused_state("generator", f"{describe(saved)} is no state of one")
    for name, x in random_state(device).items():
        if name in saved and _form(saved[name]) != _form(x):
            raise refused_state(
                "generator", f"it is {_form(x)}, and {_form(saved[name])} in the state"
            )


def load_model(model: torch.nn.Module, saved: State) -> None:
    """Give a model a state that ``check_model`` found to be one of it.

    Raises:
        CheckpointError: if the model itself refuses it, such as one with an extra state.
    """
    current = model.state_dict()
    values = {name: current[name] if x is None else x for name, x in saved.items()}
    try:
        model.load_state_dict(values)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise refused_state("model", str(error)) from error


def load_optimizer(optimizer: torch.optim.Optimizer, saved: State) -> None:
    """Give an optimizer a state, which it will go on changing.

    The number of steps stays on the host, where torch's optimizers keep it whatever the device of
    the parameters: ``load_state_dict`` moves all but that.
    """
    state = {
        index: {
            name: x.cpu() if name == "step" and isinstance(x, torch.Tensor) else x
            for name, x in kept.items()
        }
        for index, kept in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the CPU's generator and of a device's own."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Let the generators go on from what ``random_state`` returned.

    One of a run that began on the CPU has none for a GPU, and is continued as far as it goes.
    """
    torch.set_rng_state(states["cpu"].cpu())
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"].cpu(), device)


def _form(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return describe(x)
