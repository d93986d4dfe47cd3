"""The work on PyTorch, and who else can do it.

Keras names devices by its own words, of which virtual GPUs have none: its rows are on the CPU. It
has no call that places a model, nor has TensorLy; Fabric and accelerate place one on their own
device, which is the CPU here. Of einops there is what finds a tensor's framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from against import common
from against.programs import first_tensor_work, import_work
from against.work import NATIVE, Work

_WRAPPER = "one call of Python's around the framework's own, which is written in C"
_KERAS = "with keras.device('cpu'): "


def works(backend: Any, folder: Path) -> Iterator[Work]:
    """Yield each piece of work."""
    yield from _tensors(backend)
    yield from _models(backend)
    yield from _files(backend, folder)
    peers = ("array-api-compat", "accelerate", "Lightning Fabric", "Keras 3", "TensorLy", "einops")
    yield from import_work(*peers)
    yield from first_tensor_work(
        "torch",
        "import torch; torch.ones((2, 3))",
        {
            "array-api-compat": "import array_api_compat.torch as xp; xp.ones((2, 3))",
            "Keras 3": "import keras; keras.ops.ones((2, 3))",
            "TensorLy": "import tensorly as tl; tl.set_backend('pytorch'); tl.ones((2, 3))",
        },
    )


def _tensors(backend: Any) -> Iterator[Work]:
    import torch
    from torch.utils._pytree import tree_map

    for source, target in (
        ("cpu", "cpu"),
        ("gpu:0", "gpu:0"),
        ("gpu:0", "gpu:1"),
        ("cpu", "gpu:1"),
    ):
        native = backend.native(target)
        names = {"tree_map": tree_map, "move": lambda x, native=native: x.to(native)}
        one = {
            NATIVE: "x.to(native)",
            "array-api-compat": "to_device(x, native)",
            "accelerate": "send_to_device(x, native)",
            "Lightning Fabric": "move_data_to_device(x, native)",
            "TensorLy": "tl.tensor(x, device=native)",
        }
        many = {
            NATIVE: "tree_map(move, batch)",
            "accelerate": "send_to_device(batch, native)",
            "Lightning Fabric": "move_data_to_device(batch, native)",
        }
        if target == "cpu":
            one["Keras 3"] = _KERAS + "keras.ops.convert_to_tensor(x)"
            many["Keras 3"] = (
                _KERAS + "keras.tree.map_structure(keras.ops.convert_to_tensor, batch)"
            )
        reasons = {NATIVE: _WRAPPER, "array-api-compat": _WRAPPER}
        yield from common.moves(
            backend, source, target, one, many, names=names, peers=_NAMES, reasons=reasons
        )
    names = {"torch": torch}
    devices = {
        NATIVE: "x.device",
        "array-api-compat": "device_of(x)",
        "accelerate": "find_device(x)",
        "TensorLy": "tl.context(x)['device']",
    }
    frameworks = {
        "array-api-compat": "array_namespace(x)",
        "einops": "get_backend(x)",
    }
    yield from common.look_up(backend, "cpu", devices, frameworks, names, _NAMES)
    ones = {
        NATIVE: "torch.ones((2, 3), device=native)",
        "array-api-compat": "array_namespace(x).ones((2, 3), device=native)",
        "TensorLy": "tl.ones((2, 3), device=native)",
    }
    on_gpu = dict(ones)
    ones["Keras 3"] = _KERAS + "keras.ops.ones((2, 3))"
    reasons = {NATIVE: _WRAPPER, "array-api-compat": _WRAPPER}
    yield from common.creation(backend, "cpu", ones, names, _NAMES, reasons)
    yield from common.creation(backend, "gpu:0", on_gpu, names, _NAMES, reasons)


def _models(backend: Any) -> Iterator[Work]:
    there = {NATIVE: "model.to(native)", "Lightning Fabric": "fabric.to_device(model)"}
    moving = {NATIVE: "twin.to(next(natives))"}
    reasons = {
        NATIVE: "place moves everything or nothing: it finds the tensors in plain attributes, too, "
        "and what is shared, before the first one moves"
    }
    yield from common.compare_placing(backend, "cpu", there, moving, {}, _NAMES, reasons)


def _files(backend: Any, folder: Path) -> Iterator[Work]:
    import torch

    state, plain = "net.state_dict()", "folder / 'plain'"
    ways = {
        NATIVE: (f"torch.save(tensors, {plain})", f"torch.load({plain})"),
        "safetensors": common.SAFETENSORS,
        "accelerate": (
            "accelerate_save(tensors, folder / 'accelerate', safe_serialization=True)",
            "load_file(folder / 'accelerate')",
        ),
        "Lightning Fabric": (
            "fabric.save(folder / 'fabric', tensors)",
            "fabric.load(folder / 'fabric')",
        ),
    }
    model_ways = {
        NATIVE: (f"torch.save({state}, {plain})", f"net.load_state_dict(torch.load({plain}))"),
        "safetensors": (
            "save_model(net, folder / 'theirs.safetensors')",
            "load_model(net, folder / 'theirs.safetensors')",
        ),
        "accelerate": (
            "accelerator.save_model(net, folder / 'model')",
            "load_checkpoint_in_model(net, folder / 'model')",
        ),
        "Lightning Fabric": (
            "fabric.save(folder / 'fabric', {'net': net})",
            "fabric.load(folder / 'fabric', {'net': net})",
        ),
    }
    total = "sum(float(x.sum()) for x in {}.values())"
    yield from common.files(
        backend, folder, ways, model_ways, {"torch": torch}, _NAMES, total=total
    )


def _accelerate() -> dict[str, Any]:
    from accelerate import Accelerator, load_checkpoint_in_model
    from accelerate.utils import find_device, save, send_to_device

    return {
        **common.safetensors_names("torch"),
        "accelerator": Accelerator(cpu=True),
        "accelerate_save": save,
        "find_device": find_device,
        "load_checkpoint_in_model": load_checkpoint_in_model,
        "send_to_device": send_to_device,
    }


def _fabric() -> dict[str, Any]:
    from lightning_fabric import Fabric
    from lightning_fabric.utilities import move_data_to_device

    fabric = Fabric(accelerator="cpu", devices=1)
    return {"fabric": fabric, "move_data_to_device": move_data_to_device}


def _tensorly() -> dict[str, Any]:
    import tensorly

    tensorly.set_backend("pytorch")
    return {"tl": tensorly}


_NAMES = {
    "array-api-compat": common.array_api_names,
    "accelerate": _accelerate,
    "Lightning Fabric": _fabric,
    "Keras 3": common.keras_names,
    "TensorLy": _tensorly,
    "einops": common.einops_names,
    "safetensors": partial(common.safetensors_names, "torch", "load_model", "save_model"),
}
