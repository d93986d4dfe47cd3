"""What the order of a ``torch.utils.data.DataLoader`` depends on, as a nesting, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data

from d2ldev.errors import CheckpointError, describe

# Those that draw from a generator or from nothing. A list may stand in the place of a sampler.
_SAMPLERS = (
    *(data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler),
    *(data.WeightedRandomSampler, data.BatchSampler, data.DistributedSampler),
    *(list, range, type(None)),
)


def loader_state(loader: Any) -> dict[str, Any] | None:
    """The states of torch's own generator and of those that the loader has; None if it has others.

    A dataset that is iterated has its order from itself, and so has a sampler of the user's.
    """
    if isinstance(loader.dataset, data.IterableDataset):
        return None
    if any(type(sampler) not in _SAMPLERS for sampler in _samplers(loader)):
        return None
    states = [_text(generator.get_state()) for generator in _generators(loader)]
    return {"default": _text(torch.get_rng_state()), "own": states}


def checked_loader_state(loader: Any, saved: Any) -> Callable[[], None]:
    """What gives the generators the states that ``loader_state`` returned.

    Raises:
        CheckpointError: if they are no states of this loader's generators.
    """
    generators = _generators(loader)
    try:
        default, states = _tensor(saved["default"]), [_tensor(text) for text in saved["own"]]
        torch.Generator().set_state(default)  # which refuses what is no state
        for generator, state in zip(generators, states, strict=True):
            torch.Generator(generator.device).set_state(state)
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

    return go_on


def _samplers(loader: Any) -> Iterator[Any]:
    yield loader.sampler
    yield loader.batch_sampler
    yield getattr(loader.batch_sampler, "sampler", None)


def _generators(loader: Any) -> list[torch.Generator]:
    holders = [loader, *_samplers(loader)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(each): each for each in found if each is not None}.values())


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
