"""Training: ``autograd``, ``gluon.Trainer``, Gluon's loaders and MXNet's random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    NO_LABEL,
    Framework,
    Learner,
    ShardSampler,
    Tensor,
    Training,
    TrainingSettings,
    describe,
    shard_copy,
    state_refusal,
)
from d2ldev_mxnet.framework import NumPySemantics, mx

# The range of drawn seeds. ``mx.random.seed`` silently takes the low 32 bits of any number.
_SEEDS = range(2**31 - 1)


class MXNetTraining(Training):
    """Training of Gluon blocks.

    Gluon's loaders shuffle with ``np.random``, whose state the core keeps: a loader has no state
    besides.
    """

    loader_types = (mx.gluon.data.DataLoader,)

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def shard_loader(self, loader: Any, rank: int, size: int) -> Any:
        sampler = ShardSampler(loader._batch_sampler, rank, size)
        sampler.sampler = _sampler_of(loader._batch_sampler)
        return shard_copy(
            loader,
            mx.gluon.data.DataLoader,
            sampler,
            _batch_sampler=sampler,
            _iter=None,  # batches that ``auto_reload`` has read ahead
        )

    def order_of(self, loader: Any) -> list[Any]:
        batches = loader._batch_sampler
        sources = [*super().order_of(loader), loader._dataset, batches, _sampler_of(batches)]
        is_told = any(hasattr(each, "set_epoch") for each in sources)
        return [*sources, _Ahead(loader)] if is_told else sources

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        from d2ldev_mxnet.training.learner import MXNetLearner  # only training needs it

        return MXNetLearner(self._framework, model, settings)

    def module_class(self, methods: type) -> type:
        return type("Module", (methods, mx.gluon.nn.Block), {})

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with NumPySemantics():
            found = mx.np.argmax(prediction, axis=-1)
            labels = y.as_np_ndarray().astype("int64")
            number = (labels != NO_LABEL).astype("float32").sum()
            return (found == labels).astype("float32").sum() / mx.np.maximum(number, 1), number

    def random_state(self, device: Device) -> int:
        # MXNet's generators cannot be read. So this method draws a new seed, sets it, and returns
        # it as the state. Then an unbroken run and a resumed run draw the same numbers. So does a
        # run that is repeated from its begin.
        with NumPySemantics():
            seed = int(mx.np.random.randint(_SEEDS.start, _SEEDS.stop))
        mx.random.seed(seed)
        return seed

    def check_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        if type(state) is not int or state not in _SEEDS:
            raise state_refusal("generator", f"{describe(state)} is not a generator's state")
        return lambda: mx.random.seed(state)


class _Ahead:
    """What a loader has of another epoch: batches that ``auto_reload`` has read, and workers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def set_epoch(self, _epoch: int) -> None:
        loader = self._loader
        has_copies = loader._num_workers and not loader._thread_pool
        if has_copies and hasattr(loader._dataset, "set_epoch"):
            raise UnsupportedValueError(
                f"train on {describe(loader)}, whose dataset has set_epoch",
                "its worker processes have copies of the dataset from when the loader was made, "
                "and hear of no epoch",
                f"DataLoader(..., num_workers={loader._num_workers}, thread_pool=True)",
            )
        loader.clean()


def _sampler_of(batches: Any) -> Any:
    """Return the sampler of Gluon's batch sampler or of a user's; None if it has none."""
    return getattr(batches, "_sampler", getattr(batches, "sampler", None))
