"""The data of a training: its checks, and how many examples a batch has."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np

from d2ldev._backend import Backend, framework_of
from d2ldev.contract import Framework, Weighted
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.kinds import OBJECT, TENSOR, Kinds
from d2ldev.nesting.walk import flatten
from d2ldev.operations.arguments import class_refusal, is_iterable, length_of
from d2ldev.operations.examples import number_of_examples
from d2ldev.options import LOSSES, OPTIMIZERS
from d2ldev.program import spell

# -- the data of an epoch ---------------------------------------------------------------------


def check_data(data: Any, name: str, max_epochs: int) -> None:
    """Check that data is not empty, and can start again for each epoch.

    Args:
        data: the batches.
        name: the name of the argument, for errors.
        max_epochs: the number of epochs.

    Raises:
        UnsupportedValueError: if it is empty, not iterable, or an iterator for several epochs.
    """
    if not is_iterable(data):
        raise UnsupportedValueError(
            f"go through {name}={describe(data)}",
            "it is not an iterable of batches",
            f"{name}=[(X, y)], or a loader",
        )
    if max_epochs > 1 and isinstance(data, Iterator):
        raise UnsupportedValueError(
            f"go through {name} more than once",
            f"{describe(data)} is an iterator, and ends after one epoch",
            f"{name}=list({name}), or a loader",
        )
    if max_epochs and not length_of(data, 1):  # 1 for data without a length
        raise UnsupportedValueError(
            f"go through {name}", "there is no batch in it", f"{name}=[(X, y)], or None for no data"
        )


def check_batches(
    framework: Framework, verb: str, model: Any, data: Any, val_data: Any = None
) -> None:
    """Refuse an array, a model, or the name of an option in the place of batches.

    Args:
        framework: whose tensors and models they are.
        verb: the method of the Trainer that was called.
        model: its model.
        data: its batches.
        val_data: the second batches of ``fit``.

    Raises:
        UnsupportedValueError: for these, and for a class in the place of a model.
    """
    kinds = framework.state.kinds
    if isinstance(model, type):
        raise class_refusal(f"{verb} {describe(model)}", model)
    # The names of the program are read for an error alone.
    if isinstance(data, np.ndarray) or kinds[type(data)] is TENSOR:
        y = "" if verb == "predict" else f"{(val_data is not None and spell(val_data)) or 'y'}, "
        loader = f"ArrayLoader({spell(data) or 'X'}, {y}batch_size=32)"
        problem, call = (
            "an array is not an iterable of batches",
            f"{spell(model) or 'net'}, {loader}",
        )
        raise _call_refusal(verb, model, data, problem, call)
    if kinds[type(data)] is OBJECT or (callable(data) and not is_iterable(data)):
        call = f"{spell(data) or 'net'}, {spell(model) or 'data'}"
        raise _call_refusal(verb, model, data, "the model comes before the data", call)
    if isinstance(val_data, str) and val_data in (*LOSSES, *OPTIMIZERS):
        name = "loss" if val_data in LOSSES else "optimizer"
        call = f"{spell(model) or 'net'}, {spell(data) or 'X'}, {name}={val_data!r}"
        raise _call_refusal(verb, model, val_data, "the third argument is val_data", call)
    if callable(val_data) and not is_iterable(val_data):
        call = f"{spell(model) or 'net'}, {spell(data) or 'X'}, loss={spell(val_data) or '...'}"
        raise _call_refusal(verb, model, val_data, "the third argument is val_data", call)


def _call_refusal(
    verb: str, model: Any, given: Any, problem: str, call: str
) -> UnsupportedValueError:
    attempted = f"{verb} {type(model).__name__} with {describe(given)}"
    return UnsupportedValueError(attempted, problem, f"trainer.{verb}({call})")


def empty_data_refusal() -> UnsupportedValueError:
    """Return the error of data without a batch."""
    return UnsupportedValueError(
        "go through the data of an epoch",
        "there is no batch in it",
        "use data that can start again: a list or a loader, not a generator",
    )


# -- batches ----------------------------------------------------------------------------------


def check_target(y: Any, loss: Any, kinds: Kinds) -> None:
    """Check that the target of a named loss, and the weights, are arrays or tensors.

    A loss function of the user's may take any target.

    Args:
        y: the target of the batch.
        loss: a name, or a function.
        kinds: the kind of each type.

    Raises:
        UnsupportedValueError: if one of them has no shape.
    """
    tensors = [("sample_weight", y.weights)] if isinstance(y, Weighted) else []
    if isinstance(loss, str):
        tensors.append(("y", drop_weights(y)))
    for name, x in tensors:
        if name == "y" and isinstance(x, Real):
            raise axis_refusal(x)
        if kinds[type(x)] is not TENSOR and not hasattr(x, "shape"):
            raise UnsupportedValueError(
                f"train on a batch whose {name} is {describe(x)}",
                "it is not an array of numbers",
                f"yield {name} as a NumPy array or a tensor, or use a loss function of your own",
            )


def axis_refusal(y: Any) -> UnsupportedValueError:
    """Return the error of a named loss whose target has no axis: it is of one example."""
    return UnsupportedValueError(
        f"train on a batch whose y is {describe(y)}",
        "the first axis of y and of the inputs are the examples, and y has no axis",
        "give the Trainer batches: DataLoader(dataset, batch_size=32), dataset.batch(32) of "
        "tf.data, or ArrayLoader(X, y, batch_size=32)",
    )


def drop_weights(y: Any) -> Any:
    """Return a target without the weights of its examples."""
    return y.y if isinstance(y, Weighted) else y


def count_of(backend: Backend, y: Any, batch: Any = None) -> int:
    """Return the number of examples in a batch: the length of its target's first axis, or 1.

    If the target is a nesting, the whole batch decides, or else the first tensor in the target.

    Args:
        backend: the backend of its tensors.
        y: the target, or the whole batch.
        batch: the batch with the field ``y``; None without one.
    """
    framework = framework_of(backend)
    kinds = framework.state.kinds
    if kinds[type(y)] is not TENSOR:
        number = number_of_examples(framework, y if batch is None else batch)
        if number is not None:
            return number
        flat = flatten(y, kinds, "count the examples of a batch")
        y = next(iter((*flat.tensors.values(), *flat.others.values())), None)
    return length_of_first_axis(y)


def length_of_first_axis(x: Any) -> int:
    """Return the length of a tensor's first axis, or 1."""
    shape = tuple(getattr(x, "shape", ()))
    return int(shape[0]) if shape else 1
