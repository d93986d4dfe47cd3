"""Several devices or processes: add up the gradients of the shards of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import array_api_strict as xp
import numpy as np

from d2ldev import Device
from d2ldev.framework import (
    LEAST_WEIGHT,
    BatchShard,
    Framework,
    Inputs,
    Tensor,
    TrainingSettings,
    shard_batch,
    to,
    unwrap_broadcasts,
)
from d2ldev_reference.models import MLP, Layers
from d2ldev_reference.training.learner import ReferenceLearner, each_of

if TYPE_CHECKING:
    from d2ldev.framework import Group


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
        super().__init__(framework, model, settings)
        self._devices = devices

    def _differentiate(self, model: MLP, inputs: Inputs, y: Any) -> tuple[Tensor, Tensor, Layers]:
        first = self._devices[0]
        found, weights = [], []
        shards = self._split(model, inputs, y)
        for device, shard in zip(self._devices, shards, strict=True):
            if shard.number:
                there = to(self._framework, model, device)
                results = super()._differentiate(there, *shard.operands)
                found.append(to(self._framework, results, first))
                weights.append(self._weigh(shard))
        total = sum(weights)
        parts = []
        for (loss, prediction, gradients), weight in zip(found, weights, strict=True):
            share = weight / total
            scaled = each_of(lambda x, share=share: x * share, gradients)
            parts.append((loss * share, prediction, scaled))
        losses, predictions, gradients = zip(*parts, strict=True)
        # That of the whole batch.
        self.weight = None if self.weight is None else total
        return sum(losses), xp.concat(predictions), each_of(lambda *xs: sum(xs), *gradients)

    def _split(self, model: MLP, inputs: Inputs, y: Any) -> list[BatchShard]:
        return shard_batch(self._framework, model, self.settings, (inputs, y), self._devices)

    def _weigh(self, shard: BatchShard) -> float:
        """Return the weight of the loss of a shard."""
        return shard.share if self.weight is None else self.weight + shard.share * LEAST_WEIGHT

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        return super().evaluate(*unwrap_broadcasts((inputs, y), self._framework.state.kinds))


class ReferenceGroupLearner(ReferenceLearner):
    """Train the reference backend's MLP in several processes, each with its own copy.

    array-api-strict cannot communicate between processes. The numbers go as text, through rank 0.
    """

    def __init__(
        self, framework: Framework, model: Any, settings: TrainingSettings, group: Group
    ) -> None:
        super().__init__(framework, model, settings)
        self._group = group
        first = group.gather("the parameters", each_of(self._text, self._model.layers))[0]
        self._model = MLP(_sums(self._model.layers, [first]), self._model.activation)

    def _take_mean(self, sums: Layers) -> Layers:
        own = self._total, each_of(self._text, sums)
        totals, texts = zip(*self._group.gather("the gradients", own), strict=True)
        self._total = sum(totals)
        return super()._take_mean(_sums(sums, texts))

    def _text(self, x: Tensor) -> str:
        return self._framework.tensors.to_numpy(x).astype("<f4").tobytes().hex()


def _sums(layers: Layers, processes: Sequence[list[dict[str, str]]]) -> Layers:
    """Return the sums over the processes, as tensors like those of the layers."""

    def total(like: Tensor, *texts: str) -> Tensor:
        numbers = [np.frombuffer(bytes.fromhex(text), "<f4") for text in texts]
        return xp.asarray(np.sum(numbers, axis=0).reshape(like.shape), device=like.device)

    return each_of(total, layers, *processes)
