"""What a type checker says of the methods of ``Backend``, for one framework and for the handle.

mypy and pyright read it: ``tox -e types``. Nothing here is run.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

from d2ldev import Backend, Device, backend, get_backend, use_backend
from d2ldev import torch as d2l
from d2ldev.framework import Group, Learner, Memory
from d2ldev.results import LiveTensor, Loaded, Timing
from d2ldev.typing import DeviceLike, DTypeLike, Shape

Batch = dict[str, torch.Tensor]


def check_the_backend_of_a_framework() -> None:
    assert_type(d2l, Backend[torch.Tensor, torch.device])
    assert_type(d2l.native("gpu:0"), torch.device)
    assert_type(d2l.device(torch.device("cpu")), Device)
    assert_type(d2l.on("cpu"), AbstractContextManager[Device])


def check_the_handle() -> None:
    assert_type(backend, Backend[Any, Any])
    assert_type(backend.zeros(2), Any)
    assert_type(backend.device_of(backend.zeros(2)), Device)
    assert_type(get_backend("torch"), Backend[Any, Any])
    with use_backend("torch") as found:
        assert_type(found, Backend[Any, Any])


def check_creation(shape: Shape, dtype: DTypeLike, device: DeviceLike[torch.device]) -> None:
    assert_type(d2l.zeros(shape, dtype=dtype, device=device), torch.Tensor)
    assert_type(d2l.ones((2, 3), dtype="float32"), torch.Tensor)
    assert_type(d2l.full([2], 1.5, dtype=torch.float64), torch.Tensor)
    assert_type(d2l.arange(3, dtype=np.int64), torch.Tensor)
    assert_type(d2l.rand(2, seed=1, dtype=np.dtype("float32")), torch.Tensor)
    assert_type(d2l.randn(2, like=d2l.ones(2)), torch.Tensor)
    assert_type(d2l.asarray([[1, 2], [3, 4]]), torch.Tensor)
    assert_type(d2l.asarray(np.ones(2), copy=True), torch.Tensor)
    assert_type(d2l.asarray(torch.ones(2)), torch.Tensor)
    d2l.zeros("2")  # type: ignore[arg-type]
    d2l.zeros(2, dtype=2.5)  # type: ignore[arg-type]
    d2l.zeros(2, device=0.5)  # type: ignore[arg-type]
    d2l.zeros(2, like=np.ones(2))  # type: ignore[arg-type]


def check_what_comes_back_as_it_was(
    x: torch.Tensor,
    parameter: torch.nn.Parameter,
    batch: Batch,
    array: npt.NDArray[np.float32],
    text: str,
) -> None:
    assert_type(d2l.to(x, "gpu:0"), torch.Tensor)
    assert_type(d2l.to(parameter, "gpu:0"), torch.nn.Parameter)
    assert_type(d2l.to(batch, torch.device("cpu")), Batch)
    assert_type(d2l.to((x, text), "cpu"), tuple[torch.Tensor, str])
    assert_type(d2l.to(array, "gpu:0"), torch.Tensor)
    assert_type(d2l.copy(batch), Batch)
    assert_type(d2l.copy(x, "cpu"), torch.Tensor)
    assert_type(d2l.split(batch, ["gpu:0", "gpu:1"]), list[Batch])
    assert_type(d2l.split(array, ["gpu:0", "gpu:1"]), list[torch.Tensor])
    assert_type(d2l.prefetch([batch], "gpu:0"), Generator[Batch, None, None])


def check_models(net: torch.nn.Linear, optimizer: torch.optim.Adam, path: str) -> None:
    assert_type(d2l.place(net, "gpu:0"), torch.nn.Linear)
    assert_type(d2l.place((net, optimizer), "cpu"), tuple[torch.nn.Linear, torch.optim.Adam])
    assert_type(d2l.replicate(net, ["cpu"]), list[torch.nn.Linear])
    assert_type(d2l.placement(net), Mapping[str, Device])
    assert_type(d2l.named_tensors(net), Mapping[str, torch.Tensor])
    assert_type(d2l.load_into(net, path), torch.nn.Linear)
    assert_type(d2l.load_into(net, {"weight": np.ones(2)}), torch.nn.Linear)
    assert_type(d2l.load_into(net, path, strict=False), Loaded)
    assert_type(d2l.learner(net, optimizer=optimizer), Learner[torch.Tensor])
    assert_type(d2l.join_group(), Group | None)


def check_tensors(x: torch.Tensor) -> None:
    assert_type(d2l.device_of(x), Device)
    assert_type(d2l.dtype_of(x), str)
    assert_type(d2l.address(x), int)
    assert_type(d2l.to_numpy(x), npt.NDArray[Any])
    assert_type(d2l.from_dlpack(x), torch.Tensor)
    assert_type(d2l.from_dlpack(np.ones(2)), torch.Tensor)
    assert_type(d2l.accuracy(x, x), torch.Tensor)
    assert_type(d2l.memory("cpu"), Memory)
    assert_type(d2l.timeit(torch.relu, x), Timing)
    assert_type(d2l.live_tensors(), list[LiveTensor])
    d2l.device_of(3)  # type: ignore[arg-type]
    d2l.from_dlpack([1.0])  # type: ignore[arg-type]
