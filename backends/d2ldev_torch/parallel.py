"""Several devices and processes: copies of modules, and torch's engine between processes."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from d2ldev import D2LDevError, Device, UnsupportedValueError
from d2ldev.framework import (
    BatchNorm,
    Framework,
    Learner,
    Parallel,
    Tensor,
    TrainingSettings,
    count_gpus,
    deep_copy,
    list_named_tensors,
    twin_refusal,
)
from d2ldev_torch import optimizers
from d2ldev_torch.devices import TorchDevices
from d2ldev_torch.training import gradients, loaders, parametrized

if TYPE_CHECKING:
    from d2ldev.framework import Group

_BATCH_NORMS: Any = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d),
    *(torch.nn.LazyBatchNorm1d, torch.nn.LazyBatchNorm2d, torch.nn.LazyBatchNorm3d),
)

_INSTANCE_NORMS: Any = (
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
    *(torch.nn.LazyInstanceNorm1d, torch.nn.LazyInstanceNorm2d, torch.nn.LazyInstanceNorm3d),
)

# The communication library for GPUs of each type.
_ENGINES = {"cuda": "nccl", "xpu": "xccl", "vgpu": "gloo"}
# These libraries serve GPUs alone. gloo sends through the host's memory.
_OF_GPUS = ("nccl", "xccl")

_SYNCHRONIZE = "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net), for GPUs"


class TorchParallel(Parallel):
    """Copies of modules, and ``torch.distributed``.

    Args:
        framework: the framework of the models.
        devices: its area of devices.
    """

    def __init__(self, framework: Framework, devices: TorchDevices) -> None:
        self._framework, self._devices = framework, devices

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        if x.is_nested:  # torch slices none by rows
            return torch.nested.as_nested_tensor([*x.unbind()[start:stop]], layout=x.layout)
        return super().rows(x, start, stop)

    def twin(self, model: Any) -> Any:
        if not isinstance(model, torch.nn.Module):
            raise twin_refusal(model)
        # torch copies no tensor that was computed with gradients. For example, a ``weight_norm``
        # hook computes the weight before each forward pass.
        attempted = f"replicate {type(model).__name__}"
        found = [x for _, x in list_named_tensors(self._framework, model, attempted)]
        memo = {id(x): x.detach().clone() for x in found if not x.is_leaf}
        if hooked := [x for x in found if gradients.has_hooks(x)]:
            # Copied together with the model, its hooks are added to the copies of its parameters.
            twin, _ = deep_copy((model, gradients.Hooks(hooked)), memo)
            return twin
        return deep_copy(model, memo)

    def reduce(self, obj: Any) -> Any:
        if isinstance(obj, torch.optim.Optimizer):
            return optimizers.reduce(obj)
        if isinstance(obj, torch.nn.Parameter):
            return gradients.reduce(obj)
        if isinstance(obj, torch.utils.data.DataLoader):
            return loaders.reduce(obj)
        return parametrized.reduce(obj)

    def batch_norms(self, model: Any) -> Sequence[BatchNorm]:
        found = []
        for name, layer in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            if isinstance(layer, torch.nn.SyncBatchNorm):
                found.append(BatchNorm(f"SyncBatchNorm {name}", "global", "torch.nn.BatchNorm2d"))
            elif isinstance(layer, _BATCH_NORMS) or _has_statistics(layer):
                found.append(BatchNorm(f"{type(layer).__name__} {name}", "local", _SYNCHRONIZE))
        return found

    # -- several processes ------------------------------------------------------------------------

    def find_launch(self) -> str:
        is_there = distributed.is_available() and distributed.is_initialized()
        return "torch.distributed" if is_there and distributed.get_world_size() > 1 else ""

    def join(self, group: Group) -> None:
        attempted = f"train in {group.size} processes"
        if not distributed.is_available():
            raise UnsupportedValueError(
                attempted, "this build of torch has no torch.distributed", "pip install torch"
            )
        if distributed.is_initialized():
            found = distributed.get_rank(), distributed.get_world_size()
            if found != (group.rank, group.size):
                raise UnsupportedValueError(
                    attempted,
                    f"torch.distributed has rank {found[0]} of {found[1]} here, and d2ldev rank "
                    f"{group.rank} of {group.size}",
                    "torch.distributed.init_process_group() with the launcher's variables, or "
                    "leave the call out",
                )
            return
        host, _, port = group.addresses[0].rpartition(":")
        timeout = timedelta(seconds=2 * group.timeout)
        # Imported later, its functions would keep the engine as a default argument, for good.
        importlib.import_module("torch.distributed.nn")
        engines = self._engines(group)
        with _through_interface(group.addresses[group.rank].rpartition(":")[0]):
            # Not by ``init_method``: under torchrun, rank 0 would expect the agent to listen.
            # https://github.com/pytorch/pytorch/blob/main/torch/distributed/rendezvous.py
            store = distributed.TCPStore(  # type: ignore[attr-defined]
                host, int(port), group.size, is_master=group.rank == 0, timeout=timeout
            )
            try:
                distributed.init_process_group(
                    engines,
                    store=store,
                    rank=group.rank,
                    world_size=group.size,
                    timeout=timeout,
                )
            except ValueError as error:  # the driver reports a GPU that torch cannot use
                raise UnsupportedValueError(
                    attempted,
                    f"torch.distributed does not start with {engines}: {error}",
                    "update the driver; or D2LDEV_VIRTUAL_GPUS=0 in all processes, to train on "
                    "the CPU",
                ) from error
        atexit.register(_leave, group)

    def _engines(self, group: Group) -> str:
        """Return torch's engines, which are the same in all processes of a group.

        NCCL does not start without a GPU. A torch with NCCL may be on a machine without GPUs: the
        usual wheels are built for CUDA.
        """
        kind = self._devices.type
        engine = _ENGINES.get(kind, "")
        if not (
            engine and distributed.is_backend_available(engine) and count_gpus(self._framework)
        ):
            engine = ""
        found = {*group.gather("the engines of torch", engine if engine in _OF_GPUS else "")}
        if found == {""}:
            return "gloo"
        # Not "gloo": it would send the tensors on some processes' GPUs through the host.
        return f"cpu:gloo,{kind}:{engine}" if len(found) == 1 else "cpu:gloo"

    def gpu_library(self, device: Device) -> tuple[str, str | None]:
        kind = self._devices.type
        # The program may have started other engines.
        engines = dict(each.split(":") for each in distributed.get_backend_config().split(","))
        engine = engines.get(kind, _ENGINES.get(kind, "gloo"))
        return (engine.upper(), self._devices.uuid(device)) if engine in _OF_GPUS else ("", None)

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        _check_engine(model, group)
        gradients.check_hooks(model, group.size)
        # Some builds of torch have no torch.distributed.
        from d2ldev_torch.training.replicated import TorchGroupLearner

        return TorchGroupLearner(self._framework, model, settings, group)


def _check_engine(model: Any, group: Group) -> None:
    """Refuse a model on the CPU if the program has started an engine for GPUs alone."""
    engines = distributed.get_backend_config()
    is_on_cpu = isinstance(model, torch.nn.Module) and any(x.is_cpu for x in model.parameters())
    if is_on_cpu and "cpu:" not in engines:
        raise UnsupportedValueError(
            f"train a model on the CPU in {group.size} processes",
            f"the program has started torch.distributed with {engines}, which lacks the CPU",
            "Trainer(max_epochs, num_gpus=1), or torch.distributed.init_process_group() with "
            "'cpu:gloo,cuda:nccl', or leave the call out",
        )


_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: "get the address of an interface"


@contextmanager
def _through_interface(host: str) -> Iterator[None]:
    """Let gloo use the network by which the processes have found each other.

    By default gloo uses the network of the machine's name, or only the machine itself.
    https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables
    """
    name = None if _INTERFACE in os.environ else _interface(host)
    if name is None:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _interface(host: str) -> str | None:
    """Return the name of the network interface with an address; None if it is unknown."""
    with suppress(ImportError, OSError):
        import fcntl  # not on Windows

        wanted = socket.inet_aton(socket.gethostbyname(host))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # the interface has no address
                    request = struct.pack("256s", name.encode())
                    if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                        return name
    return None


def _leave(group: Group) -> None:
    """End the engine at exit; after a lost process it would wait for that process."""
    with suppress(D2LDevError, RuntimeError):
        group.check()
        if distributed.is_initialized():
            distributed.destroy_process_group()
            # What refers to itself keeps the engine, whose threads would see the interpreter end.
            gc.collect()


def _has_statistics(layer: torch.nn.Module) -> bool:
    """Return whether a user's own layer keeps the statistics of batches, as a BatchNorm does."""
    has_mean = isinstance(getattr(layer, "running_mean", None), torch.Tensor)
    return has_mean and not isinstance(layer, _INSTANCE_NORMS)
