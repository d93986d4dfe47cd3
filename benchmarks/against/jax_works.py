"""The work on JAX, and who else can do it.

Keras has nothing that moves an array of JAX, and TensorLy nothing that has to do with devices: its
backend sets ``jax_enable_x64`` when it is imported, so that only its import is here, which is in an
interpreter of its own. What Keras makes on a device is not committed to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from against import common
from against.programs import first_tensor_work, import_work
from against.work import NATIVE, Work
from natives import jax_names

_PUT = "device_put is compiled code, around which d2ldev checks the devices first"
_UNCOMMITTED = (
    "Keras does not commit the tensor to the device, and the next operation may move it; "
    "d2ldev commits it, which takes JAX longer"
)


def works(backend: Any, folder: Path) -> Iterator[Work]:
    """Yield each piece of work."""
    import jax
    from flax import nnx

    names = {**jax_names(), "nnx": nnx}
    # Each array is waited for by itself: waiting for a device takes longer than what is measured.
    names["ready"] = jax.block_until_ready
    put = "jax.device_put({}, native)"
    for source, target in (("cpu", "cpu"), ("gpu:0", "gpu:1"), ("cpu", "gpu:1")):
        ready = "{}" if source == target else "ready({})"
        one = {
            NATIVE: ready.format(put.format("x")),
            "array-api-compat": ready.format("to_device(x, native)"),
        }
        many = {NATIVE: ready.format(put.format("batch"))}
        yield from common.moves(
            backend,
            source,
            target,
            one,
            many,
            names=names,
            peers=_NAMES,
            ready=ready,
            reasons={NATIVE: _PUT},
        )
    devices = {NATIVE: "x.device", "array-api-compat": "device_of(x)"}
    frameworks = {"array-api-compat": "array_namespace(x)", "einops": "get_backend(x)"}
    yield from common.look_up(backend, "gpu:0", devices, frameworks, names, _NAMES)
    ones = {
        NATIVE: "jnp.ones((2, 3), device=native)",
        "array-api-compat": "array_namespace(x).ones((2, 3), device=native)",
        "Keras 3": "with keras.device(native): keras.ops.ones((2, 3))",
    }
    yield from common.creation(backend, "gpu:0", ones, names, _NAMES, {"Keras 3": _UNCOMMITTED})
    there = {NATIVE: "by_hand(model, native)"}
    moving = {NATIVE: "by_hand(twin, next(natives))"}
    yield from common.compare_placing(backend, "gpu:0", there, moving, names, _NAMES)
    yield from _files(backend, folder, names)
    yield from import_work("array-api-compat", "Keras 3", "TensorLy", "einops")
    yield from first_tensor_work(
        "jax",
        "import jax.numpy as jnp; jnp.ones((2, 3)).block_until_ready()",
        {
            "Keras 3": "import keras; keras.ops.ones((2, 3)).block_until_ready()",
            "TensorLy": "import tensorly as tl; tl.set_backend('jax'); tl.ones((2, 3))",
        },
    )


def _files(backend: Any, folder: Path, names: dict[str, Any]) -> Iterator[Work]:
    ways = {
        "safetensors": common.SAFETENSORS,
        "orbax": (
            "saved(folder / 'orbax', tensors)",
            "orbax.restore(folder / 'orbax', target=tensors)",
        ),
    }
    model_ways = {
        "orbax": (
            "saved(folder / 'model', nnx.state(net))",
            "nnx.update(net, orbax.restore(folder / 'model', target=nnx.state(net)))",
        ),
    }
    total = "sum(float(x.sum()) for x in {}.values())"
    yield from common.files(backend, folder, ways, model_ways, names, _NAMES, total=total)


def _orbax() -> dict[str, Any]:
    from orbax.checkpoint import StandardCheckpointer

    checkpointer = StandardCheckpointer()

    def save(path: Path, state: Any) -> None:
        checkpointer.save(path, state, force=True)
        checkpointer.wait_until_finished()

    return {"orbax": checkpointer, "saved": save}


_NAMES = {
    "array-api-compat": common.array_api_names,
    "Keras 3": common.keras_names,
    "einops": common.einops_names,
    "safetensors": partial(common.safetensors_names, "flax"),
    "orbax": _orbax,
}
