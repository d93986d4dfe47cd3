"""``tf.data``'s own prefetching, where the batches are a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import tensorflow as tf

from d2ldev.device import CPU, Device
from d2ldev.interface import Backend
from d2ldev.operations.batches import bring
from d2ldev.operations.prefetching import moved_ahead

# What is never in a GPU's memory, and would stop ``tf.data`` on its way there.
_OF_THE_HOST = (tf.string, tf.variant, tf.resource)


def can_prefetch(batches: Any) -> bool:
    """Whether ``tf.data`` can bring these batches to any device by itself."""
    return isinstance(batches, tf.data.Dataset) and all(
        isinstance(spec, tf.TensorSpec) and spec.dtype not in _OF_THE_HOST
        for spec in tf.nest.flatten(batches.element_spec)
    )


def prefetched(
    backend: Backend, batches: tf.data.Dataset, device: Device, depth: int
) -> Generator[Any, None, None]:
    """The batches of a dataset, ``depth`` of them ahead on the device.

    TensorFlow's own threads go ahead, also where eager execution would wait for each batch. They
    end with the iterator, which ends with this generator.
    """
    if device is CPU:
        ahead = batches.prefetch(depth)
    else:
        to_device = tf.data.experimental.prefetch_to_device(backend.native(device), depth)
        ahead = batches.apply(to_device)
    # What TensorFlow leaves in the host's memory, int32 on a GPU, is brought over in the end.
    return moved_ahead(ahead, 0, lambda batch: bring(backend, batch, device))
