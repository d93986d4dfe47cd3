"""What the order of a ``gluon.data.DataLoader`` depends on, besides NumPy's random numbers."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import data

_SAMPLERS = (data.SequentialSampler, data.RandomSampler, list, range)


def loader_state(loader: Any) -> bool | None:
    """True if it depends on nothing else; None if that cannot be said.

    Gluon's samplers shuffle with ``np.random``. A sampler or a subclass of the user's may do
    anything, with ``last_batch='rollover'`` an epoch begins with what the last one has left, and
    with ``auto_reload`` its order was drawn while the one before was under way.
    """
    batches = loader._batch_sampler
    if type(loader).__iter__ is not data.DataLoader.__iter__ or loader.auto_reload:
        is_known = False
    elif type(batches) is data.BatchSampler:
        is_known = batches._last_batch != "rollover" and type(batches._sampler) in _SAMPLERS
    else:
        is_known = type(batches) is list
    return is_known or None
