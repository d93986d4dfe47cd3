"""What is compared with what, for each framework.

A framework other than torch is measured with two virtual GPUs, so that a model can really be moved.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import batches
import natives
from loops import FRAMEWORKS as TRAINED
from measure import Addition, Comparison, ProcessComparison, Row

_LAYERS = 50


def import_rows() -> Iterator[Row]:
    """Measure what importing d2ldev costs, whatever the framework."""
    yield ProcessComparison("import d2ldev", "import d2ldev", "pass", aim=15)
    yield ProcessComparison(
        "import Python's own modules that d2ldev needs",
        "import functools, importlib.util, reprlib, threading, warnings, weakref",
        "pass",
        aim=None,
        note="the floor of an import",
    )
    yield ProcessComparison(
        "import the backend's handle",
        "from d2ldev import backend",
        "pass",
        aim=None,
        note="with all that its methods need, without a framework",
    )


def torch_rows() -> Iterator[Row]:
    """Compare with PyTorch on the CPU, through the handle and through the backend itself."""
    import torch

    import d2ldev

    d2ldev.set_backend("torch")
    x = torch.ones(2, 3)
    names: dict[str, Any] = {
        "torch": torch,
        "backend": d2ldev.backend,
        "d2l": d2ldev.get_backend("torch"),
        "device": d2ldev.cpu(),
        "native": torch.device("cpu"),
        "x": x,
        "batch": {"x": x, "y": [x, x]},
        "model": torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50))),
    }
    accelerate = "accelerate is not installed: pip install accelerate"
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.utils import send_to_device

        names["send_to_device"] = send_to_device
        accelerate = ""

    for handle in ("backend", "d2l"):

        def row(
            name: str, ours: str, theirs: str, aim: float | None, note: str = "", via: str = handle
        ) -> Comparison:
            return Comparison(name, f"{via}.{ours}", theirs, aim, names, note)

        yield row("to, a tensor already there", "to(x, device)", "x.to(native)", 0.75)
        yield row("device_of", "device_of(x)", "x.device", 1.7)
        ones, zeros = "ones((2, 3), device=device)", "zeros((2, 3), device=device)"
        yield row("ones", ones, "torch.ones((2, 3), device=native)", 1.05)
        yield row("ones, separate sizes", ones, "torch.ones(2, 3, device=native)", None)
        yield row("zeros", zeros, "torch.zeros((2, 3), device=native)", None)
        theirs = "" if accelerate else "send_to_device(batch, native)"
        yield row("to, a batch already there", "to(batch, device)", theirs, 0.30, accelerate)
        yield row(
            "place, 50 layers already there", "place(model, device)", "model.to(native)", 1.10
        )

    yield from _call_rows(x)
    yield from batches.placement_rows(d2ldev.backend)
    yield from _strict_rows(2.5)
    yield _first_use("torch", "import torch; torch.ones(2, 3)")


def _call_rows(x: Any) -> Iterator[Row]:
    """Compare methods of Python that only ask for a device with what they ask: the floors."""

    class Room:
        def device_of(self, x: Any) -> Any:
            return x.device

    class Handle:
        def __init__(self, room: Any) -> None:
            self.room = room

        def device_of(self, x: Any) -> Any:
            return self.room.device_of(x)

    names = {"room": Room(), "handle": Handle(Room()), "x": x}
    for calls, owner in (("one call", "room"), ("a call of a room", "handle")):
        title = f"floor of device_of: {calls} in Python"
        yield Comparison(title, f"{owner}.device_of(x)", "x.device", None, names)


def virtual_torch_rows() -> Iterator[Row]:
    """Compare with PyTorch on two virtual GPUs: what moves between them, and what is computed."""
    backend = _with_two_virtual_gpus("torch")
    yield from batches.torch_rows(backend)
    yield from _virtual_operation_rows(backend)


def _virtual_operation_rows(backend: Any) -> Iterator[Row]:
    """Compare operations on a virtual GPU of PyTorch's with the CPU's, and with what they need."""
    import torch

    there, here = backend.native("gpu:0"), torch.device("cpu")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    lenet, loop = TRAINED["torch"]().lenet, next(iter(TRAINED["torch"]().loops.values()))
    images, labels = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    names: dict[str, Any] = {"x": x, "y": y, "x_gpu": x.to(there), "y_gpu": y.to(there)}
    names |= {"relu": torch.relu, **_floor_kernels(x, y)}
    for native, suffix in ((here, ""), (there, "_gpu")):
        names[f"epoch{suffix}"] = loop(lenet().to(native))
        names[f"batches{suffix}"] = [(images.to(native), labels.to(native))] * 2
    for name, ours, theirs, aim, note in (
        ("x + y", "x_gpu + y_gpu", "x + y", 5.0, ""),
        ("relu", "relu(x_gpu)", "relu(x)", 5.0, ""),
        ("matmul", "x_gpu @ y_gpu", "x @ y", 5.0, ""),
        (
            "the lowest cost of x + y",
            "kernel(x_gpu, y_gpu)",
            "x + y",
            None,
            "a Python kernel that runs the CPU's and makes no result",
        ),
        (
            "the lowest cost with a result",
            "with_result(x_gpu, y_gpu)",
            "x + y",
            None,
            "and makes a tensor of the virtual GPU on the memory of the CPU's result",
        ),
        (
            "the lowest cost with operands",
            "with_operands(x_gpu, y_gpu)",
            "x + y",
            None,
            "and finds the CPU's tensors of its operands, unless their memory, shape or strides "
            "have changed",
        ),
        (
            "epoch of LeNet on gpu:0 against cpu",
            "epoch_gpu(batches_gpu)",
            "epoch(batches)",
            2.0,
            "",
        ),
    ):
        title = name if "against" in name else f"{name} on a virtual GPU against the CPU"
        yield Comparison(title, ours, theirs, aim, names, note)


def _floor_kernels(x: Any, y: Any) -> dict[str, Any]:
    """Return operators whose Python kernels do a part of what one on a virtual GPU has to do.

    No virtual GPU whose kernels are in Python can be faster. What is left to ``x + y`` is to take
    any arguments, to count memory, and to leave autocast, autograd and views to torch.
    """
    import torch
    from d2ldev_torch.virtual.memory import origin_of

    from d2ldev.operations.dlpack import description_of

    library = torch.library.Library("d2ldev_floor", "DEF")
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    add = torch.ops.aten.add.Tensor._handle.redispatch_boxed

    def kernel(x_gpu: Any, _y_gpu: Any) -> Any:
        add(on_cpu, x, y)
        return x_gpu

    def make(result: Any) -> Any:
        capsule = torch._C._to_dlpack(result)
        description = description_of(capsule)
        description.device_type, description.device_id = 12, 0  # kDLExtDev
        return torch._C._from_dlpack(capsule)

    def with_result(_x_gpu: Any, _y_gpu: Any) -> Any:
        return make(add(on_cpu, x, y))

    def with_operands(x_gpu: Any, y_gpu: Any) -> Any:
        found = [origin_of(each) for each in (x_gpu, y_gpu)]
        return make(add(on_cpu, *(each[0] for each in found if each is not None)))

    for function in (kernel, with_result, with_operands):
        library.define(f"{function.__name__}(Tensor x, Tensor y) -> Tensor")
        library.impl(function.__name__, function, "PrivateUse1")
    _kept.append(library)  # its kernels go with it
    operators = torch.ops.d2ldev_floor
    return {name: getattr(operators, name) for name in ("kernel", "with_result", "with_operands")}


_kept: list[Any] = []


def jax_rows() -> Iterator[Row]:
    """Compare with JAX: committed arrays, one ``device_put`` for a tree."""
    backend = _with_two_virtual_gpus("jax")
    device = backend.gpu(0)
    native = backend.native(device)
    x = backend.ones((2, 3), device=device)
    names = {
        **_common_names(backend, x),
        **natives.jax_names(),
        "native": native,
        "natives": itertools.cycle([backend.native("gpu:0"), backend.native("gpu:1")]),
    }
    yield from _rows(
        names,
        to=("jax.device_put(x, native)", 0.03),
        batch=("jax.device_put(batch, native)", 0.06),
        ones="jnp.ones((2, 3), device=native)",
        place="by_hand(twin, next(natives))",
    )
    # The same array, natively: JAX compiles a program for it, which is not our doing.
    theirs = (
        "import jax; d = jax.devices('cpu')[0]; s = jax.sharding.SingleDeviceSharding(d)\n"
        "with jax.default_device(d): jax.lax.full((2, 3), 1.0, 'float32', sharding=s)"
    )
    yield from batches.jax_rows(backend)
    yield from _strict_rows(1.05)
    yield _first_use("jax", theirs)


def tensorflow_rows() -> Iterator[Row]:
    """Compare with TensorFlow, which copies with ``tf.identity``."""
    backend = _with_two_virtual_gpus("tensorflow")
    device = backend.gpu(0)
    native = backend.native(device)
    x = backend.ones((2, 3), device=device)
    names = {
        **_common_names(backend, x),
        **natives.tensorflow_names(),
        "native": native,
        "natives": itertools.cycle([backend.native("gpu:0"), backend.native("gpu:1")]),
    }
    yield from _rows(
        names,
        to=("identity(x, native)", 0.015),
        batch=("identity(batch, native)", None),
        ones="ones(native)",
        place="by_hand(twin, next(natives))",
    )
    yield from batches.tensorflow_rows(backend)
    yield from _strict_rows(1.5)
    yield _first_use("tensorflow", "import tensorflow as tf; tf.ones((2, 3))")


def mxnet_rows() -> Iterator[Row]:
    """Compare with MXNet, whose ``as_in_ctx`` returns what is there, as ``to`` does."""
    backend = _with_two_virtual_gpus("mxnet")
    import mxnet

    device = backend.gpu(0)
    native = backend.native(device)
    x = backend.ones((2, 3), device=device)

    def by_hand(model: Any, target: Any) -> None:
        model.collect_params().reset_ctx(target)

    names = {
        **_common_names(backend, x),
        "mx": mxnet,
        "native": native,
        "by_hand": by_hand,
        "natives": itertools.cycle([backend.native("gpu:0"), backend.native("gpu:1")]),
    }
    yield from _rows(
        names,
        to=("x.as_in_ctx(native)", 0.70),
        batch=("{'x': x.as_in_ctx(native), 'y': [x.as_in_ctx(native) for x in (x, x)]}", None),
        ones="mx.np.ones((2, 3), ctx=native)",
        place="by_hand(twin, next(natives))",
    )
    theirs = (
        "import numpy; numpy.bool = bool; import mxnet as mx; mx.np.ones((2, 3)).wait_to_read()"
    )
    yield from batches.mxnet_rows(backend)
    yield from _strict_rows(1.5)
    yield _first_use("mxnet", theirs)


def _with_two_virtual_gpus(name: str) -> Any:
    os.environ["D2LDEV_VIRTUAL_GPUS"] = "2"
    import d2ldev

    return d2ldev.set_backend(name)


def _common_names(backend: Any, x: Any) -> dict[str, Any]:
    import d2ldev

    sizes = [8] * (_LAYERS + 1)
    return {
        "backend": d2ldev.backend,
        "device": backend.gpu(0),
        "devices": itertools.cycle([backend.gpu(0), backend.gpu(1)]),
        "x": x,
        "batch": {"x": x, "y": [x, backend.ones((2, 3), device=backend.gpu(0))]},
        "model": backend.mlp(sizes, device="gpu:0"),
        "twin": backend.mlp(sizes, device="gpu:0"),
    }


def _rows(
    names: dict[str, Any],
    *,
    to: tuple[str, float | None],
    batch: tuple[str, float | None],
    ones: str,
    place: str,
) -> Iterator[Row]:
    """Make the same comparisons for each framework, and show what the question alone takes."""
    yield Comparison("to, a tensor already there", "backend.to(x, device)", *to, names)
    floor = "to, a tensor already there: device_of alone"
    yield Comparison(floor, "backend.device_of(x)", to[0], None, names)
    yield Comparison("to, a batch already there", "backend.to(batch, device)", *batch, names)
    yield Comparison("ones", "backend.ones((2, 3), device=device)", ones, 1.05, names)
    ours = "backend.place(model, next(devices))"
    yield Comparison(f"place, {_LAYERS} layers that move", ours, place, 1.10, names)


def _strict_rows(aim: float) -> Iterator[Row]:
    """Compare an operation on small tensors inside ``strict()`` with the same outside."""
    import d2ldev

    backend = d2ldev.backend
    names = {
        "x": backend.ones((8, 8)),
        "y": backend.ones((8, 8)),
        "net": backend.mlp([8, 8]),
        "learner": backend.learner(backend.mlp([8, 8])),
    }
    for name, statement in {
        "add": "x + y",
        "matmul": "x @ y",
        "a dense layer": "net(x)",
        "a training step": "learner.step((x,), y)",
    }.items():
        yield Comparison(
            f"strict: {name}",
            statement,
            statement,
            aim,
            names,
            within=backend.strict,
            finish=backend.synchronize,
        )


def _first_use(name: str, theirs: str) -> Addition:
    """Measure what d2ldev adds to a framework's import and its own first operation."""
    ours = f"from d2ldev import {name} as d2l; d2l.to(d2l.ones((2, 3)), d2l.try_gpu())"
    return Addition(f"first use, after {name}'s own", ours, theirs, aim=0.05)


FRAMEWORKS: dict[str, Callable[[], Iterator[Row]]] = {
    "torch": torch_rows,
    "torch-virtual": virtual_torch_rows,
    "jax": jax_rows,
    "tensorflow": tensorflow_rows,
    "mxnet": mxnet_rows,
}
