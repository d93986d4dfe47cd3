"""What an optimizer of torch's has learned, as a nesting, and back.

The numbers of its ``state_dict``, and the shapes of its parameters, which that lacks: what was
learned for other parameters is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from d2ldev.errors import describe


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its class, the shapes of its parameters, and its ``state_dict``."""
    return {
        "class": type(optimizer).__name__,
        "shapes": [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups],
        **optimizer.state_dict(),
    }


def state_put(optimizer: torch.optim.Optimizer, saved: Any) -> Callable[[], None]:
    """What gives an optimizer a state, whose tensors are brought to its parameters at once.

    Past ``load_state_dict``, which makes all that it keeps the parameters' dtype.

    Raises:
        ValueError: if the state is no such optimizer's.
    """
    _check(optimizer, saved)
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for index, kept in saved["state"].items():
        parameter, group = parameters[index]
        states[parameter] = {
            key: _moved(x, _device_of(key, parameter, group)) for key, x in kept.items()
        }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in saved["param_groups"]
    ]

    def put() -> None:
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)

    return put


def _check(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    current = state_of(optimizer)
    if not isinstance(saved, Mapping) or saved.keys() != current.keys():
        raise ValueError(f"{describe(saved)} is no state of an optimizer of torch's")
    for key in ("class", "shapes"):
        if saved[key] != current[key]:
            raise ValueError(f"its {key}: {current[key]}, {saved[key]} in the state")
    if _settings(saved["param_groups"]) != _settings(current["param_groups"]):
        raise ValueError("its groups have other settings")
    kept, count = saved["state"], sum(map(len, current["shapes"]))
    if not isinstance(kept, Mapping) or not all(
        type(index) is int and 0 <= index < count and isinstance(values, Mapping)
        for index, values in kept.items()
    ):
        raise ValueError(f"{describe(kept)} is not what it keeps for its parameters")


def _settings(groups: Any) -> Any:
    """The names of the settings of each group, and the numbers of its parameters."""
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return None
    return [(sorted(map(str, group)), group.get("params")) for group in groups]


def _device_of(key: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    # torch's own policy: the step stays on the host, unless the kernel itself reads it.
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return parameter.device


def _moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, (list, tuple)):
        return type(x)(_moved(item, device) for item in x)
    return x
