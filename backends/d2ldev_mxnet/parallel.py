"""Several devices: copies of models, and ``kvstore`` between devices and processes.

Batch normalization has the statistics of the examples on its own device, or in its own process. A
run leaves the means of the devices' running statistics; of several processes it leaves rank 0's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from d2ldev import Device
from d2ldev.framework import (
    BatchNorm,
    Framework,
    Learner,
    Parallel,
    Tensor,
    TrainingSettings,
    deep_copy,
    twin_refusal,
)
from d2ldev_mxnet.framework import NumPySemantics, mx
from d2ldev_mxnet.servers import servers_of

if TYPE_CHECKING:
    from d2ldev.framework import Group


def _restore_gradients(block: Any) -> None:
    """Make the gradients that a copy of a block has lost, without those of its children."""
    for parameter in block._reg_params.values():
        if parameter._data is not None:
            parameter._init_grad()


class MXNetParallel(Parallel):
    """Training on several devices of one process, and in several processes."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        if start < stop:
            return x[start:stop]
        with NumPySemantics():  # in which a shard may be empty
            return x[start:stop]

    def twin(self, model: Any) -> Any:
        if not isinstance(model, mx.gluon.Block):
            raise twin_refusal(model)
        # The graph of a hybridized block holds pointers; the copy makes its own.
        graphs: dict[int, Any] = {}
        model.apply(lambda block: graphs.update({id(getattr(block, "_cached_op", None)): None}))
        twin = deep_copy(model, graphs)
        with NumPySemantics():
            twin.apply(_restore_gradients)
        return twin

    def batch_norms(self, model: Any) -> Sequence[BatchNorm]:
        # The SyncBatchNorm of MXNet 1.9.1 cannot compute with arrays of mx.np.
        found: list[BatchNorm] = []

        def note(block: Any) -> None:
            if isinstance(block, mx.gluon.nn.BatchNorm):
                found.append(BatchNorm(block.name, "local"))

        if isinstance(model, mx.gluon.Block):
            model.apply(note)
        return found

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        from d2ldev_mxnet.training.replicated import MXNetParallelLearner

        return MXNetParallelLearner(self._framework, model, settings, devices)

    # -- several processes ------------------------------------------------------------------------

    def find_launch(self) -> str:
        is_alone = os.environ.get("DMLC_NUM_WORKER", "").strip() in ("", "0", "1")
        return "" if is_alone or os.environ.get("DMLC_ROLE") != "worker" else "DMLC_NUM_WORKER"

    def join(self, group: Group) -> None:
        servers_of(group)

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        from d2ldev_mxnet.training.replicated import MXNetGroupLearner

        return MXNetGroupLearner(self._framework, model, settings, group, servers_of(group))
