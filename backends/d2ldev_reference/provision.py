"""Set-up for the conformance suite: objects of every kind that ``place`` handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import array_api_strict as xp

from d2ldev import Device
from d2ldev.framework.testing import array_api_of

_WITHOUT_LAYERS = (
    *("networks", "networks_with_batch_norm", "freezables", "loops", "own_optimizers"),
    *("untrainable_models", "models_without_parameters", "models_with_masks"),
    *("models_with_losses", "attention_models", "models_with_branches", "models_with_tables"),
    *("modes", "models_with_permutations", "modules"),
    *("buffers", "ties", "optimizer_states", "parameter_orders"),
)
CANNOT = {
    **dict.fromkeys(_WITHOUT_LAYERS, "array-api-strict has no layers and no optimizers"),
    "views": "models of arrays are immutable here, and get other arrays",
    "gradients": "array-api-strict has no gradients",
    "composites": "array-api-strict has no containers of arrays",
    "hostile_tensors": "array-api-strict has no arrays but dense ones",
    "random": "array-api-strict draws no numbers",
    **dict.fromkeys(
        ("gradient", "map", "compile", "update"), "array-api-strict transforms no functions"
    ),
}


def own_tensors(backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return calls of array-api-strict that return arrays.

    Some name the device of the block: nothing can set array-api-strict's default device.
    """

    def there(name: str) -> Callable[..., Any]:
        return lambda *args: getattr(xp, name)(*args, device=backend.zeros(0).device)

    names = ("arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros")
    creations = SimpleNamespace(**{name: there(name) for name in names})
    return {**array_api_of(xp), **array_api_of(creations)}


def samples(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of small objects, by name; each takes the device of its object."""

    def tie(device: Device) -> dict[str, Any]:
        weight = backend.rand((3, 3), seed=0, device=device)
        return {"encoder": {"weight": weight}, "decoder": [weight, None, 2.5, "tied"]}

    return {"pytree with a tie": tie}
