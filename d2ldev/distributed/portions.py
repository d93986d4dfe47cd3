"""Several processes: where each of them trains, and on which shard of a batch.

Source: D2L, section 13.6.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.contract import Framework, Portion, Sharded
from d2ldev.contract.abilities import require
from d2ldev.contract.parallel import least_examples
from d2ldev.contract.training import bounds
from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError
from d2ldev.operations.examples import Whole
from d2ldev.operations.moving import to_numpy
from d2ldev.operations.parallel import empty_batch_refusal

if TYPE_CHECKING:
    from d2ldev.contract.group import Group

# With it, NCCL lets processes share a GPU since version 2.30.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


def check_devices(framework: Framework, group: Group, devices: Iterable[Device]) -> None:
    """Compare the devices on which the processes of a group train.

    Every process calls it. A library that sends between GPUs waits forever for a process on the
    CPU. It fails if two processes share a GPU.

    Args:
        framework: whose model they train.
        group: the processes.
        devices: on which this one trains.

    Raises:
        UnsupportedValueError: in all processes, if they cannot train on these devices.
    """
    used = sorted({*devices}) or [CPU]
    ask, may_share = framework.parallel.gpu_library, os.environ.get(_SHARING, "0") not in ("", "0")
    told = [("", None) if each is CPU else ask(each) for each in used]
    library = max(name for name, _ in told)
    names = [
        (str(each), None if may_share else uuid) for each, (_, uuid) in zip(used, told, strict=True)
    ]
    found = [_Place(*each) for each in group.gather("the devices", [names, library])]
    libraries = [each.library for each in found]
    if not any(libraries):
        return
    places = [f"rank {rank} on {host}" for rank, host in enumerate(group.hosts)]
    attempted = f"train in {group.size} processes"
    if not all(libraries):
        first, other = libraries.index(max(libraries)), libraries.index("")
        raise UnsupportedValueError(
            attempted,
            f"{places[first]} trains on {found[first].devices[0][0]} and {places[other]} on "
            f"{found[other].devices[0][0]}, and {libraries[first]} sends between GPUs alone",
            "Trainer(max_epochs, num_gpus=0) in all processes, or a GPU for each of them",
        )
    users = defaultdict(list)
    for place, (its_devices, _) in zip(places, found, strict=True):
        for name, uuid in its_devices:
            users[uuid].append(f"{name} of {place}")
    shared = [
        f"{' and '.join(them)} are one GPU ({uuid})"
        for uuid, them in users.items()
        if uuid is not None and len(them) > 1
    ]
    if shared:
        raise UnsupportedValueError(
            attempted,
            f"{', '.join(shared)}, and {library} needs a GPU of its own for each process",
            "as many processes on a machine as it has GPUs: d2ldev launch --processes 1. Each has "
            "a Trainer(max_epochs, num_gpus=1), which takes gpu(LOCAL_RANK). On the CPU: "
            "Trainer(max_epochs, num_gpus=0)",
        )


class _Place(NamedTuple):
    """Where a process trains: names and UUIDs of its devices, and what sends between them."""

    devices: list[tuple[str, str | None]]
    library: str


class Portions:
    """The portions of batches that this process has, in the order of the data.

    Args:
        framework: whose tensors are in the batches.
        group: the processes.
        model: what is trained on the shards; None if it is only evaluated.
    """

    def __init__(self, framework: Framework, group: Group, model: Any = None) -> None:
        self._framework, self._group, self._model = framework, group, model
        self._waiting: deque[_Taken] = deque()
        self._shapes = ""

    def select(self, batch: Any) -> Any:
        """Return this process's shard of a batch, on the host.

        Raises:
            UnsupportedValueError: if the batch has no examples, or cannot be split.
        """
        attempted = f"split a batch over {self._group.size} processes"
        if isinstance(batch, Sharded):
            portion = Portion(batch.number, batch.length)
            self._check_number(portion)
            if "split sequences over processes" in self._framework.cannot:
                self._check_sharded(batch)
            self._waiting.append(_Taken(portion, f"{batch.length} examples", batch.content))
            return batch.operands
        whole = Whole(self._framework, batch, attempted)
        if not whole.length:
            raise empty_batch_refusal()
        if whole.has_sequences:
            self._require_sequences(attempted)
        operands, number = whole.shard(
            self._group.rank, self._group.size, is_filled=True, model=self._model
        )
        shapes, targets = f"shapes {whole.shapes}", f"targets {self._checksum(whole.last)}"
        self._waiting.append(_Taken(Portion(number, whole.length), shapes, targets))
        return operands

    def next(self, label: str) -> Portion:
        """Return this process's portion of the next batch, and compare the batch with the others'.

        Args:
            label: of the batch, for a message.

        Raises:
            PeerLostError: if a process is lost.
            UnsupportedValueError: if the batches of the processes differ.
        """
        portion, shapes, targets = self._waiting.popleft()
        if shapes == self._shapes:
            self._group.mark(label, f"{shapes} {targets}")
        else:
            # Other shapes in another process may end this one in the engine, so that it waits.
            self._group.gather(label, content=f"{shapes} {targets}")
            self._shapes = shapes
        return portion

    def _check_number(self, portion: Portion) -> None:
        """Refuse a shard with fewer examples than the model needs, which the loader has chosen."""
        number, length = portion
        if self._model is None or length >= 2 * self._group.size:
            return
        least = least_examples(self._framework.parallel.batch_norms(self._model))
        if length >= least and any(
            0 < stop - start < least
            for start, stop in (
                bounds(length, i, self._group.size) for i in range(self._group.size)
            )
        ):
            raise UnsupportedValueError(
                f"train on {number} of the {length} examples of a batch",
                "batch normalizations of a process's shard need 2 examples in each shard",
                "drop_last=True in the loader; or trainer.fit(net, data) without "
                "trainer.shard_data, where fewer processes share such a batch",
            )

    def _require_sequences(self, attempted: str) -> None:
        fix = "a NumPy array of them, or d2ldev.Broadcast(value) for what all shards have"
        require(self._framework, "split sequences over processes", attempted, fix)

    def _check_sharded(self, batch: Sharded) -> None:
        attempted = "train on a shard of a batch"
        if Whole(self._framework, batch.operands, attempted).has_sequences:
            self._require_sequences(attempted)

    def _checksum(self, x: Any) -> str:
        """Return a sum that differs where processes read different batches.

        It reads the last tensor, which is the target: each process may change inputs at random. It
        reads it on the host only, so that it does not wait for a device.
        """
        if x is None or self._framework.tensors.device_of(x) is not CPU:
            return "elsewhere"
        return f"{zlib.crc32(to_numpy(self._framework, x).tobytes()):08x}"


class _Taken(NamedTuple):
    portion: Portion
    shapes: str
    targets: str
