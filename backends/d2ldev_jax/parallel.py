"""Several devices: ``jax.sharding`` splits the examples of a batch over a mesh of one axis.

Several processes use ``jax.distributed``, with NCCL on CUDA and gloo on the CPU.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from d2ldev import D2LDevError, Device, UnsupportedValueError
from d2ldev.framework import (
    BatchNorm,
    Framework,
    Learner,
    Parallel,
    TrainingSettings,
    clone_keras_model,
    deep_copy,
    gpu_of_process,
    twin_refusal,
)
from d2ldev_jax.devices import JaxDevices, is_initialized
from d2ldev_jax.keras import is_layer
from d2ldev_jax.training import check_libraries

if TYPE_CHECKING:
    from d2ldev.framework import Group

# The library with which XLA sends between GPUs, by platform.
_LIBRARIES = {"cuda": "NCCL", "rocm": "RCCL"}


class JaxParallel(Parallel):
    """Train on several devices of one process, or on one device of each process.

    A program computes the whole batch, and XLA splits it. So batch normalization uses the
    statistics of the global batch, and dropout draws the masks of one device.

    Args:
        framework: the owner of the arrays.
        devices: its devices.
    """

    joins_at_start = True

    def __init__(self, framework: Framework, devices: JaxDevices) -> None:
        self._framework, self._devices = framework, devices

    def twin(self, model: Any) -> Any:
        from flax import nnx

        if is_layer(model):
            return clone_keras_model(model)
        if not isinstance(model, nnx.Module):
            raise twin_refusal(model)
        return deep_copy(model, {})

    def batch_norms(self, model: Any) -> Sequence[BatchNorm]:
        check_libraries()
        from flax import nnx

        if is_layer(model):
            has_statistics = any(x.name == "moving_mean" for x in model.variables)
        else:
            is_model = isinstance(model, nnx.Module)
            has_statistics = is_model and jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        # A step is one program for the whole batch.
        return [BatchNorm("batch normalization", "global")] if has_statistics else []

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        check_libraries()
        from d2ldev_jax.training.learner import JaxLearner
        from d2ldev_jax.training.places import SeveralDevices

        natives = [self._devices.native(device) for device in devices]
        return JaxLearner(self._framework, model, settings, partial(SeveralDevices, natives))

    def find_launch(self) -> str:
        # Not ``jax.process_count()``, which initialises the devices.
        is_there = jax.distributed.is_initialized() and distributed.global_state.num_processes > 1
        return "jax.distributed" if is_there else ""

    def join(self, group: Group) -> None:
        end_at_once = partial(_end_if_failed, group)
        atexit.register(end_at_once)
        if not jax.distributed.is_initialized():
            self._start(group)
        if not jax.distributed.is_initialized():
            atexit.unregister(end_at_once)
            atexit.register(end_in_time_if_failed, group)
        found = jax.process_count(), jax.process_index()
        if found != (group.size, group.rank):
            raise UnsupportedValueError(
                f"train in {group.size} processes",
                f"this process is number {found[1]} of {found[0]} in jax.distributed, and rank "
                f"{group.rank} of the launch",
                "leave out jax.distributed.initialize(...), or give it RANK and WORLD_SIZE",
            )

    def _start(self, group: Group) -> None:
        if is_initialized():
            raise UnsupportedValueError(
                f"train in {group.size} processes",
                "JAX was in use before d2ldev could connect it to the other processes",
                "`from d2ldev import jax` above the line that makes JAX's first array or model",
            )
        numbers = group.gather("the GPUs of JAX", self._devices.count_cuda())
        if any(numbers) and not all(numbers):
            raise _refuse_mixed(group, numbers)
        jax.distributed.initialize(
            group.addresses[0],
            group.size,
            group.rank,
            self._devices.find_visible_gpus(group.local_rank),
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(2 * group.timeout)),
        )
        if jax.config.jax_cpu_collectives_implementation == "gloo":
            _listen_at(group.addresses[group.rank].rpartition(":")[0])
        # The first call that asks for devices waits for all processes.
        natives = [*self._devices.cpus(), *self._devices.gpus()]
        is_cpu = all(native.platform == "cpu" for native in natives)
        if all(group.gather("the devices", is_cpu)):
            self._leave_service(group)

    def _leave_service(self, group: Group) -> None:
        """Connect the processes, and then leave JAX's coordination service.

        When a process is lost, the service aborts the other processes. Without the service the
        group raises an error: https://docs.jax.dev/en/latest/fault_tolerance.html. On GPUs JAX
        needs the service as long as it trains.
        """
        from d2ldev_jax.training.places import SeveralProcesses

        gpus = self._devices.gpus()
        # A ``Trainer`` trains on these devices.
        index = gpu_of_process(len(gpus), group.local_rank)
        for native in [self._devices.cpus()[0], *gpus[index : index + 1]]:
            SeveralProcesses(group, native).broadcast_first([jax.device_put(np.zeros(1), native)])
        jax.distributed.shutdown()

    def gpu_library(self, device: Device) -> tuple[str, str | None]:
        library = _LIBRARIES.get(self._devices.platform(device), "")
        return library, self._devices.uuid(device) if library else None

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        check_libraries()
        from d2ldev_jax.training.learner import JaxLearner
        from d2ldev_jax.training.places import SeveralProcesses

        return JaxLearner(self._framework, model, settings, partial(SeveralProcesses, group))


def _refuse_mixed(group: Group, numbers: Sequence[int]) -> UnsupportedValueError:
    """Return the error for processes with and without GPUs: JAX would wait for all of them."""
    some, none = numbers.index(next(filter(None, numbers))), numbers.index(0)
    return UnsupportedValueError(
        f"train in {group.size} processes",
        f"rank {none} on {group.hosts[none]} has no GPU, and rank {some} on {group.hosts[some]} "
        f"has {numbers[some]}. JAX needs one platform in all processes",
        "JAX_PLATFORMS=cpu in all processes, to train on the CPU; or a GPU for each of them",
    )


def _end_if_failed(group: Group) -> None:
    """End this process if its group has failed, after Python has shown the error.

    Otherwise JAX waits at exit for the lost process.
    """
    try:
        group.check()
    except D2LDevError:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def end_in_time_if_failed(group: Group) -> None:
    """End this process within ``timeout`` if its group has failed.

    At exit JAX's client of the CPU waits for its computations. These may wait for a stopped
    process. Python's threads have ended by then.
    """
    try:
        group.check()
    except D2LDevError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(group.timeout, exit=True, file=nowhere)


def _listen_at(host: str) -> None:
    """Make gloo listen at the address that the other processes use for this machine.

    Its default is the address of the machine's name, which other machines may not be able to reach.
    """

    def make_client() -> Any:
        client = distributed.global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=host))

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
