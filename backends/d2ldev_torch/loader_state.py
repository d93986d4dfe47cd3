"""What the order of a ``torch.utils.data.DataLoader`` depends on, as a nesting, and back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import data

from d2ldev.errors import CheckpointError, describe

# Those that draw from a generator, from the number of the epoch, or from nothing. A list may stand
# in the place of a sampler.
_SAMPLERS = (
    *(data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler),
    *(data.WeightedRandomSampler, data.BatchSampler, data.DistributedSampler),
    *(list, range),
)


def loader_state(loader: Any) -> dict[str, Any] | None:
    """The states of torch's own generator and of those that the loader has; None if it has others.

    A dataset that is iterated has its order from itself, and so have a sampler and a subclass of
    the user's. Workers that live on draw from what they were given when they began.
    """
    is_torchs_own = (
        type(loader).__iter__ is data.DataLoader.__iter__
        and type(loader)._get_iterator is data.DataLoader._get_iterator
        and all(type(sampler) in _SAMPLERS for sampler in _samplers(loader))
    )
    is_streamed = isinstance(loader.dataset, data.IterableDataset)
    if not is_torchs_own or is_streamed or loader.persistent_workers:
        return None
    return {
        "default": _text(torch.get_rng_state()),
        "own": [_text(generator.get_state()) for generator in _generators(loader)],
        "epochs": [sampler.epoch for sampler in _numbered(loader)],
    }


def checked_loader_state(loader: Any, saved: Any) -> Callable[[], None]:
    """What gives the generators the states that ``loader_state`` returned.

    Raises:
        CheckpointError: if they are no states of this loader's generators.
    """
    generators, samplers = _generators(loader), _numbered(loader)
    try:
        default, states = _tensor(saved["default"]), [_tensor(text) for text in saved["own"]]
        torch.Generator().set_state(default)  # which refuses what is no state
        for generator, state in zip(generators, states, strict=True):
            torch.Generator(generator.device).set_state(state)
        epochs = [operator.index(epoch) for epoch in saved["epochs"]]
        numbered = list(zip(samplers, epochs, strict=True))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            "go on with the order of a DataLoader",
            f"{describe(saved)} is no state of its generators",
            "resume with a loader of the kind that the run began with",
        ) from error

    def go_on() -> None:
        torch.set_rng_state(default)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for sampler, epoch in numbered:
            sampler.set_epoch(epoch)

    return go_on


def _samplers(loader: Any) -> Iterator[Any]:
    """The loader's samplers, and those that they have themselves."""
    for sampler in (loader.sampler, loader.batch_sampler):
        while sampler is not None:
            yield sampler
            # Of torch's own only batches have another; what one of the user's has, it may not use.
            sampler = getattr(sampler, "sampler", None)


def _numbered(loader: Any) -> list[data.DistributedSampler[Any]]:
    """The samplers that are told the number of the epoch."""
    samplers = _samplers(loader)
    return _unique(each for each in samplers if isinstance(each, data.DistributedSampler))


def _generators(loader: Any) -> list[torch.Generator]:
    found = (getattr(holder, "generator", None) for holder in (loader, *_samplers(loader)))
    return _unique(each for each in found if each is not None)


def _unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in objects}.values())


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
