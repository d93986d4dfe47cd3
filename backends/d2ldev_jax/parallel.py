"""Several devices: ``jax.sharding``, with a mesh of one axis, over the examples of a batch.

Between processes it is ``jax.distributed``, with NCCL on CUDA and gloo on the CPU.
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

from d2ldev.device import Device, gpu
from d2ldev.errors import D2LDevError, UnsupportedValueError
from d2ldev.framework import Framework, Learner, Parallel, Settings
from d2ldev.framework.parallel import deep_copy, gpu_of_process, statistics_refusal, twin_refusal
from d2ldev_jax.devices import JaxDevices, is_initialized
from d2ldev_jax.training import check_libraries

if TYPE_CHECKING:
    from d2ldev.processes.group import Group

# Of a platform: the library by which XLA sends between GPUs.
_LIBRARIES = {"cuda": "NCCL", "rocm": "RCCL"}


class JaxParallel(Parallel):
    """Training on several devices of one process, and on one device of each of several processes.

    Batch normalization has the statistics of the global batch, and dropout the masks of one device:
    the program is written for the whole batch, and XLA splits it.

    Args:
        framework: whose arrays are trained.
        devices: its room of devices.
    """

    joins_at_start = True

    def __init__(self, framework: Framework, devices: JaxDevices) -> None:
        self._framework, self._devices = framework, devices

    def twin(self, model: Any) -> Any:
        from flax import nnx

        if not isinstance(model, nnx.Module):
            raise twin_refusal(model)
        return deep_copy(model, {})

    def check_batch_norm(self, model: Any, wanted: str) -> None:
        check_libraries()
        from flax import nnx

        is_model = isinstance(model, nnx.Module)
        if wanted == "local" and is_model and jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
            problem = "a step is one program for the whole batch, and has the statistics of it"
            raise statistics_refusal(wanted, problem, "batch_norm='global'")

    def learner(self, model: Any, settings: Settings, devices: Sequence[Device]) -> Learner:
        check_libraries()
        from d2ldev_jax.training.learner import JaxLearner
        from d2ldev_jax.training.places import SeveralDevices, ShardedDevices

        places = SeveralDevices if settings.shard is None else ShardedDevices
        natives = [self._devices.native(device) for device in devices]
        return JaxLearner(self._framework, model, settings, partial(places, natives))

    def is_joined(self) -> bool:
        # Not ``jax.process_count()``, which looks for devices.
        return jax.distributed.is_initialized() and distributed.global_state.num_processes > 1

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
                f"jax.distributed has {found[0]}, of which this is number {found[1]}, and rank "
                f"{group.rank} of the launch",
                "leave out jax.distributed.initialize(...), or give it RANK and WORLD_SIZE",
            )

    def _start(self, group: Group) -> None:
        if is_initialized():
            raise UnsupportedValueError(
                f"train in {group.size} processes",
                "JAX was in use before it was told of the others",
                "d2ldev.set_backend('jax') before anything asks JAX for a device or an array",
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
        # The first who looks for devices waits for all processes.
        natives = [*self._devices.cpus(), *self._devices.gpus()]
        is_cpu = all(native.platform == "cpu" for native in natives)
        if all(group.gather("the devices", is_cpu)):
            self._leave_service(group)

    def _leave_service(self, group: Group) -> None:
        """Connect the processes, and leave JAX's coordination service, which is not needed then.

        When a process is lost, the service ends the others with an abort, where the group raises an
        error: https://docs.jax.dev/en/latest/fault_tolerance.html. On GPUs JAX goes on to need it.
        """
        from d2ldev_jax.training.places import SeveralProcesses

        gpus = self._devices.gpus()
        # The devices on which a ``Trainer`` trains.
        index = gpu_of_process(len(gpus), group.local_rank)
        for native in [self._devices.cpus()[0], *gpus[index : index + 1]]:
            SeveralProcesses(group, native).broadcast_first([jax.device_put(np.zeros(1), native)])
        jax.distributed.shutdown()

    def gpu_library(self) -> str:
        return _LIBRARIES.get(self._devices.platform(gpu(0)), "")

    def learner_of_group(self, model: Any, settings: Settings, group: Group) -> Learner:
        check_libraries()
        from d2ldev_jax.training.learner import JaxLearner, JaxShardLearner
        from d2ldev_jax.training.places import SeveralProcesses

        if settings.shard is not None:
            return JaxShardLearner(self._framework, model, settings, group)
        return JaxLearner(self._framework, model, settings, partial(SeveralProcesses, group))


def _refuse_mixed(group: Group, numbers: Sequence[int]) -> UnsupportedValueError:
    """Return the error of processes of which some have GPUs, and others would be waited for."""
    some, none = numbers.index(next(filter(None, numbers))), numbers.index(0)
    return UnsupportedValueError(
        f"train in {group.size} processes",
        f"rank {none} on {group.hosts[none]} has no GPU, rank {some} on {group.hosts[some]} has "
        f"{numbers[some]}, and JAX looks for those of all processes together",
        "JAX_PLATFORMS=cpu in all processes, to train on the CPU; or a GPU for each of them",
    )


def _end_if_failed(group: Group) -> None:
    """End a process whose group has failed, and whose error was shown already.

    JAX would wait at exit for the process that is lost.
    """
    try:
        group.check()
    except D2LDevError:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def end_in_time_if_failed(group: Group) -> None:
    """End a process whose group has failed, if it does not end by itself within ``timeout``.

    JAX's client of the CPU waits at exit for what it computes, and that for a process that is
    stopped. By then no thread of Python's runs any more.
    """
    try:
        group.check()
    except D2LDevError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(group.timeout, exit=True, file=nowhere)


def _listen_at(host: str) -> None:
    """Let gloo use the address by which the other processes know this one's machine.

    By itself it takes that of the machine's name, which may be known to this machine alone.
    """

    def make_client() -> Any:
        client = distributed.global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=host))

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
