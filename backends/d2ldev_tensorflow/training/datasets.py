"""Datasets that are sharded between processes: each process gets its shard of each batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from d2ldev.framework import Sharded, bounds, shard_refusal

# ``autograph`` would write a Python file for each function that it converts.
_AS_IT_IS = tf.autograph.experimental.do_not_convert


class ShardedDataset:
    """One process's shard of each batch of a ``tf.data.Dataset``.

    Each process reads the whole dataset, as with ``AutoShardPolicy.DATA``: only the dataset knows
    which examples make a batch. ``map`` processes the shard alone.

    Args:
        dataset: yields batches.
        rank, size: the number of the process, from 0, and the number of processes.
    """

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        specs = tf.nest.flatten(dataset.element_spec)
        are_batches = (isinstance(x, tf.TensorSpec) and x.shape.rank != 0 for x in specs)
        if not specs or not all(are_batches):
            raise shard_refusal(dataset)

        def shard_of(length: Any) -> Any:
            start, stop = bounds(int(length), rank, size)
            # A process without examples computes with the first one.
            return np.array([start, stop, stop - start] if stop > start else [0, 1, 0])

        def cut(*batch: Any) -> Any:
            tensors = tf.nest.flatten(batch)
            length = tf.shape(tensors[0])[0]
            found = tf.numpy_function(shard_of, [length], tf.int64, stateful=False)
            start, stop, number = tf.unstack(found, num=3)
            with tf.control_dependencies(
                [tf.debugging.assert_equal(tf.shape(x)[0], length) for x in tensors]
            ):
                own = tf.nest.map_structure(lambda x: x[start:stop], batch)
            # A dataset that shuffles without a seed yields other batches in each process.
            content = tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(tensors[-1]), 2**62)
            return own, number, length, content

        self._dataset = dataset.map(_AS_IT_IS(cut), tf.data.AUTOTUNE)
        # ``tf.data`` passes a named tuple as one argument.
        self._is_tuple = type(dataset.element_spec) is tuple

    def map(self, function: Callable[..., Any]) -> ShardedDataset:
        """Return the dataset with ``function(*batch)`` of each shard, as ``tf.data`` calls it.

        The function is traced without ``autograph``: use ``tf.cond`` to depend on a tensor's value.
        """

        def map_own(own: Any, *others: Any) -> Any:
            new = function(*own)
            return new if type(new) is tuple else (new,), *others

        other = copy.copy(self)
        other._dataset = self._dataset.map(_AS_IT_IS(map_own), tf.data.AUTOTUNE)
        other._is_tuple = len(other._dataset.element_spec[0]) > 1
        return other

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        for own, number, length, content in self._dataset.prefetch(tf.data.AUTOTUNE):
            operands = own if self._is_tuple else own[0]
            yield Sharded(operands, int(number), int(length), f"batch {int(content):x}")
