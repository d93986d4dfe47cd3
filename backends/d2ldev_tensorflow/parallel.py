"""Several devices: copies of models, and ``tf.distribute`` between devices and processes.

Batch normalization uses the statistics of the examples on its own device, and keeps the first
device's. With ``synchronized=True`` it uses the statistics of all examples.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    BatchNorm,
    Framework,
    Inventory,
    Learner,
    Parallel,
    Tensor,
    TrainingSettings,
    clone_keras_model,
    deep_copy,
    describe,
    list_named_tensors,
    twin_refusal,
)
from d2ldev_tensorflow.devices import (
    has_started,
    let_memory_grow,
    place_of,
    tasks_of_engine,
    wait_for_peers,
)
from d2ldev_tensorflow.models import find_learned_beside_variables, is_of_keras, list_layers

if TYPE_CHECKING:
    from d2ldev.framework import Group

_REPLICATE = "replicate a model"


class TensorFlowParallel(Parallel):
    """Training on several devices of one process, and in several processes."""

    joins_at_start = True

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self.strategy: tf.distribute.Strategy | None = None
        """The strategy of several processes; a process can have only one."""

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        with tf.device(place_of(x)):
            return x[start:stop]

    def twin(self, model: Any) -> Any:
        if is_of_keras(model, "Layer"):
            places = [x.value.device for x in model.variables[:1]]
            with tf.device(places[0] if places else None):
                twin = clone_keras_model(model)
                _learn_beside_variables(twin, model)
        elif isinstance(model, tf.Module):
            inventory = Inventory(self._framework, model, _REPLICATE)
            # A tensor that is only traced cannot be copied. Any other is its own deep copy.
            tensors = [x for _, x in inventory.entries if not isinstance(x, tf.Variable)]
            copies = {id(x): self._copy(x) for x in tensors}
            twin = deep_copy(model, {**inventory.without_values, **copies})
        else:
            raise twin_refusal(model)
        # A variable has the memory of what it was assigned until one of them is written.
        for _, x in list_named_tensors(self._framework, twin, _REPLICATE):
            if isinstance(x, tf.Variable):
                x.assign(self._copy(x))
        return twin

    def _copy(self, x: Tensor) -> Tensor:
        native = self._framework.devices.native(self._framework.tensors.device_of(x))
        return self._framework.tensors.transfer([x], native, copy=True)[0]

    def batch_norms(self, model: Any) -> Sequence[BatchNorm]:
        import keras

        layers = [x for x in list_layers(model) if isinstance(x, keras.layers.BatchNormalization)]
        return [
            BatchNorm(
                f"the layer {layer.name}",
                "global" if layer.synchronized else "local",
                f"keras.layers.BatchNormalization(synchronized={not layer.synchronized})",
            )
            for layer in layers
        ]

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        if not is_of_keras(model, "Layer"):
            raise UnsupportedValueError(
                f"train {describe(model)} on {len(devices)} devices",
                "every object with a variable of the tf.Module would need another variable",
                "use a keras.Model, whose variables may have a copy on each device",
            )
        from d2ldev_tensorflow.training.replicated import TensorFlowParallelLearner

        return TensorFlowParallelLearner(self._framework, model, settings, devices)

    # -- several processes ------------------------------------------------------------------------

    def find_launch(self) -> str:
        if tasks_of_engine() > 1:
            return "tf.distribute"
        text = os.environ.get("TF_CONFIG", "").strip()
        try:
            cluster = json.loads(text or "{}").get("cluster", {})
            # An evaluator trains nothing.
            number = sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
        except (AttributeError, TypeError, ValueError):
            number = 2  # a launcher has set this variable, too, even if it cannot be read
        return "TF_CONFIG" if number > 1 else ""

    def join(self, group: Group) -> None:
        if tasks_of_engine() > 1:
            raise UnsupportedValueError(
                f"train in {group.size} processes",
                "the program has made a MultiWorkerMirroredStrategy; a process can have one only",
                "leave it out: d2ldev makes it between the processes of the launch",
            )
        if has_started():
            raise UnsupportedValueError(
                f"train in {group.size} processes",
                "TensorFlow has started already, and looks for other processes only at its start",
                "`from d2ldev import tensorflow` above the line that makes the first tensor or "
                "model",
            )
        if self._framework.virtual_gpus is None:
            let_memory_grow()
        wait_for_peers(group.size, 2 * group.timeout)
        distribute = tf.distribute.experimental
        # On the CPU, whatever the model's device: a strategy cannot use virtual GPUs. It is made
        # before the program says whether it uses a real GPU.
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": group.addresses}),
            task_type="worker",
            task_id=group.rank,
            rpc_layer="grpc",
        )
        from d2ldev_tensorflow.training.replicated import GroupStrategy

        self.strategy = GroupStrategy(
            resolver,
            distribute.CommunicationOptions(
                timeout_seconds=2 * group.timeout,
                implementation=distribute.CommunicationImplementation.RING,
            ),
        )

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        from d2ldev_tensorflow.training.replicated import TensorFlowGroupLearner

        return TensorFlowGroupLearner(self._framework, model, settings, group, self.strategy)


def _learn_beside_variables(twin: Any, model: Any) -> None:
    """Give a copy the state that a model's preprocessing layers keep outside variables."""
    mine, theirs = (
        [layer for layer, what in find_learned_beside_variables(each) if what == "vocabulary"]
        for each in (twin, model)
    )
    for new, old in zip(mine, theirs, strict=True):
        if words := old.get_vocabulary(include_special_tokens=False):
            new.set_vocabulary(words)
    for layer in list_layers(twin):
        if isinstance(layer, sys.modules["keras"].layers.Normalization):
            layer.finalize_state()  # computes with the variables
