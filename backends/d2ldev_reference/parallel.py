"""Several devices or processes: add up the gradients of the shards of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import array_api_strict as xp
import numpy as np

from d2ldev.framework import (
    NO_LABEL,
    BatchShard,
    Device,
    Framework,
    Inputs,
    Learner,
    Parallel,
    Tensor,
    Tensors,
    TrainingSettings,
    Weighted,
    may_leave_out,
    shard_batch,
    to,
    unwrap_broadcasts,
)
from d2ldev_reference.models import MLP, Layers
from d2ldev_reference.training import ReferenceLearner, each_of

if TYPE_CHECKING:
    from d2ldev.framework import Group


class ReferenceParallel(Parallel):
    """Training on several devices, and in several processes."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        return ReferenceParallelLearner(self._framework, model, settings, devices)

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        return ReferenceGroupLearner(self._framework.tensors, model, settings, group)


class ReferenceParallelLearner(ReferenceLearner):
    """Train the reference backend's MLP on several devices. In a step each has a copy."""

    @property
    def takes_marks(self) -> bool:
        return True

    def __init__(
        self,
        framework: Framework,
        model: Any,
        settings: TrainingSettings,
        devices: Sequence[Device],
    ) -> None:
        super().__init__(framework.tensors, model, settings)
        self._framework = framework
        self._devices = devices

    def _differentiate(self, model: MLP, inputs: Inputs, y: Any) -> tuple[Tensor, Tensor, Layers]:
        first = self._devices[0]
        found = []
        shards = shard_batch(self._framework, model, self.settings, (inputs, y), self._devices)
        for device, share, shard in zip(
            self._devices, self._compute_shares(y, shards), shards, strict=True
        ):
            if shard.number:
                there = to(self._framework, model, device)
                results = super()._differentiate(there, *shard.operands)
                loss, prediction, gradients = to(self._framework, results, first)
                scaled = each_of(lambda x, share=share: x * share, gradients)
                found.append((loss * share, prediction, scaled))
        losses, predictions, gradients = zip(*found, strict=True)
        return sum(losses), xp.concat(predictions), each_of(lambda *xs: sum(xs), *gradients)

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        return super().evaluate(*unwrap_broadcasts((inputs, y), self._framework.state.kinds))

    def _compute_shares(self, y: Any, shards: list[BatchShard]) -> list[float]:
        """Return the share of each shard in the loss of the batch."""
        leaves_out = may_leave_out(self)
        if not isinstance(y, Weighted) and not leaves_out:
            return [shard.share for shard in shards]
        total = self._sum_weights(y, leaves_out) or 1.0  # the loss is 0 if all weights are 0
        return [self._sum_weights(shard.operands[1], leaves_out) / total for shard in shards]

    def _sum_weights(self, y: Any, leaves_out: bool) -> float:
        """Return the sum of the targets' weights; a label that does not count has none."""
        y, weights = y if isinstance(y, Weighted) else (y, None)
        if weights is not None and not leaves_out:
            return float(xp.sum(weights))
        counts = xp.astype(xp.astype(y, xp.int64) != NO_LABEL, xp.float32)
        if weights is not None:
            counts = counts * xp.reshape(weights, (*weights.shape, *[1] * (y.ndim - weights.ndim)))
        return float(xp.sum(counts))


class ReferenceGroupLearner(ReferenceLearner):
    """Train the reference backend's MLP in several processes, each with its own copy.

    array-api-strict cannot communicate between processes. The numbers go as text, through rank 0.
    """

    def __init__(
        self, tensors: Tensors, model: Any, settings: TrainingSettings, group: Group
    ) -> None:
        super().__init__(tensors, model, settings)
        self._group = group
        first = group.gather("the parameters", each_of(self._text, self._model.layers))[0]
        self._model = MLP(_sums(self._model.layers, [first]), self._model.activation)

    def _differentiate(self, model: MLP, inputs: Inputs, y: Any) -> tuple[Tensor, Tensor, Layers]:
        assert self.portion is not None
        share = self.portion.share
        loss, prediction, gradients = super()._differentiate(model, inputs, y)
        texts = each_of(lambda x: self._text(x * share), gradients)
        return loss, prediction, _sums(gradients, self._group.gather("the gradients", texts))

    def _text(self, x: Tensor) -> str:
        return self._tensors.to_numpy(x).astype("<f4").tobytes().hex()


def _sums(layers: Layers, processes: list[list[dict[str, str]]]) -> Layers:
    """Return the sums over the processes, as tensors like those of the layers."""

    def total(like: Tensor, *texts: str) -> Tensor:
        numbers = [np.frombuffer(bytes.fromhex(text), "<f4") for text in texts]
        return xp.asarray(np.sum(numbers, axis=0).reshape(like.shape), device=like.device)

    return each_of(total, layers, *processes)
