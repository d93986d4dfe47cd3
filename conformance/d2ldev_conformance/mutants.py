"""Plausible mistakes in any backend: each mutant replaces one method by a wrong one.

``d2ldev conformance NAME --mutants`` puts each of them into the author's own backend, in a process
of its own. The suite should then be red. A mutant that stays green is a mistake that a green run of
this backend would not show.

Held by ``tests/suite/test_generic_mutants.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

import d2ldev.framework
from d2ldev import gpu
from d2ldev.framework import (
    CPU,
    Framework,
    Learner,
    Role,
    Weighted,
    count_gpus,
)

Method = Callable[..., Any]


@dataclass(frozen=True)
class Mutant:
    """One method of an area, replaced by a wrong one.

    Args:
        name: what users see: ``'tensors.seed-does-nothing'``.
        fault: what the method does wrong, in one sentence.
        change: returns the wrong method, given the framework and its own method.
        likely: the requirements that should catch it. Without a mutant they are tried first, and
            the mutant does not apply if none of them passes.
        needs: names in ``Framework.cannot``: a framework that lacks one cannot be wrong in it.
        needs_gpus: how many GPUs it needs.
        is_optional: whether it does not apply to d2ldev's own method, which an author may keep.
    """

    name: str
    fault: str
    change: Callable[[Framework, Method], Method]
    likely: tuple[str, ...]
    needs: tuple[str, ...] = ()
    is_optional: bool = False
    needs_gpus: int = 0

    @property
    def area(self) -> str:
        """The area whose method it replaces."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        """The method that it replaces."""
        return self.name.partition(".")[2].partition("-")[0]

    def find_obstacle(self, framework: Framework) -> str:
        """Return why a framework cannot make this mistake; empty if it can."""
        for ability in self.needs:
            if ability in framework.cannot:
                return f"cannot[{ability!r}]: {framework.cannot[ability]}"
        if (number := count_gpus(framework)) < self.needs_gpus:
            return f"it needs {self.needs_gpus} GPUs, and there are {number}"
        area, base = getattr(framework, self.area), getattr(d2ldev.framework, self.area.title())
        if self.is_optional and getattr(type(area), self.method) is getattr(base, self.method):
            return f"the backend has no {base.__name__}.{self.method} of its own"
        return ""

    def apply(self, framework: Framework) -> None:
        """Replace the method of a framework, until the process ends."""
        area = getattr(framework, self.area)
        setattr(area, self.method, self.change(framework, getattr(area, self.method)))

    def pass_on(self, framework: Framework) -> None:
        """Replace the method by a function that calls it, and changes nothing."""
        area = getattr(framework, self.area)
        own = getattr(area, self.method)
        setattr(area, self.method, lambda *args, **options: own(*args, **options))


def _returns(value: Any) -> Callable[[Framework, Method], Method]:
    """Return a change to a method that does nothing and returns one value."""
    return lambda _framework, _own: lambda *_args, **_options: value


def _swap_gpus(_framework: Framework, own: Method) -> Method:
    other = {gpu(0): gpu(1), gpu(1): gpu(0)}
    return lambda device: own(other.get(device, device))


def _return_argument(framework: Framework, own: Method) -> Method:
    def transfer(xs: Any, native: Any, **options: Any) -> Any:
        device = framework.devices.from_native(native)
        is_here = [device is not None and framework.tensors.is_on(x, device) for x in xs]
        others = [x for x, is_done in zip(xs, is_here, strict=True) if not is_done]
        moved = iter(own(others, native, **options) if others else ())
        return [x if is_done else next(moved) for x, is_done in zip(xs, is_here, strict=True)]

    return transfer


def _forget_last_of_transfer(_framework: Framework, own: Method) -> Method:
    def transfer(xs: Any, native: Any, **options: Any) -> Any:
        if len(xs) < 2:
            return own(xs, native, **options)
        return [*own(xs[:-1], native, **options), xs[-1]]

    return transfer


def _make_on_the_cpu(framework: Framework, own: Method) -> Method:
    return lambda shape, value, dtype, _native: own(
        shape, value, dtype, framework.devices.native(CPU)
    )


def _share_with_numpy(framework: Framework, own: Method) -> Method:
    def from_data(obj: Any, dtype: Any, native: Any) -> Any:
        if isinstance(obj, np.ndarray) and dtype is None:
            try:
                x = framework.tensors.from_dlpack(obj)
            except Exception:  # such as for memory at another multiple than the framework's
                return own(obj, dtype, native)
            if framework.tensors.is_on(x, framework.devices.from_native(native) or CPU):
                return x
        return own(obj, dtype, native)

    return from_data


def _forget_last_member(_framework: Framework, own: Method) -> Method:
    return lambda obj: list(own(obj))[:-1]


def _call_all_trained(_framework: Framework, own: Method) -> Method:
    counted = (Role.PARAMETER, Role.BUFFER)
    return lambda obj: [
        slot._replace(role=Role.PARAMETER, is_trained=True) if slot.role in counted else slot
        for slot in own(obj)
    ]


def _swap_layers(_framework: Framework, own: Method) -> Method:
    def layers(model: Any) -> Any:
        found = own(model)
        return found and [*found[1::-1], *found[2:]]

    return layers


def _return_nothing_to_do(_framework: Framework, own: Method) -> Method:
    def prepare(*args: Any, **options: Any) -> Method:
        own(*args, **options)
        return lambda: None

    return prepare


def _change_learner(
    change: Callable[[Learner[Any]], None],
) -> Callable[[Framework, Method], Method]:
    """Return a change to ``learner`` whose learners are wrong."""

    def change_method(_framework: Framework, own: Method) -> Method:
        def learner(*args: Any, **options: Any) -> Learner[Any]:
            made: Learner[Any] = own(*args, **options)
            change(made)
            return made

        return learner

    return change_method


def _train_in_evaluation(learner: Learner[Any]) -> None:
    if learner.settings.optimizer is not None:
        vars(learner)["evaluate"] = learner.step


def _forget_weights(learner: Learner[Any]) -> None:
    step = learner.step
    vars(learner)["step"] = lambda inputs, y: step(inputs, y.y if isinstance(y, Weighted) else y)


def _take_the_first(_framework: Framework, own: Method) -> Method:
    return lambda x, start, stop: own(x, 0, stop - start)


def _copy_shallowly(_framework: Framework, _own: Method) -> Method:
    return copy.copy


_LIST: Sequence[Mutant] = (
    Mutant(
        "devices.native-swaps-two",
        "The framework's objects of two GPUs are swapped.",
        _swap_gpus,
        ("devices.native-comes-back", "create.on-the-device"),
        needs_gpus=2,
    ),
    Mutant(
        "devices.scope-does-nothing",
        "A block leaves the framework's own default device as it was.",
        lambda _framework, _own: lambda _device: nullcontext(),
        ("strict.keeps-what-was-moved",),
        is_optional=True,
    ),
    Mutant(
        "devices.synchronize-does-nothing",
        "It returns while work is queued.",
        _returns(None),
        ("sync.waits-for-queued-work", "sync.waits-for-all-queued-work"),
        is_optional=True,
    ),
    Mutant(
        "devices.is_idle-is-always-true",
        "A device is called idle while work is queued there.",
        _returns(True),
        ("sync.waits-for-queued-work", "sync.waits-for-all-queued-work"),
        is_optional=True,
    ),
    Mutant(
        "tensors.full-ignores-the-device",
        "A new tensor is on the CPU, whatever device was asked for.",
        _make_on_the_cpu,
        ("create.on-the-device",),
        needs_gpus=1,
    ),
    Mutant(
        "tensors.from_data-shares-memory",
        "A new tensor has the memory of the user's NumPy array.",
        _share_with_numpy,
        ("create.never-aliases-numpy",),
        ("dlpack",),
    ),
    Mutant(
        "tensors.transfer-returns-the-argument",
        "A copy on the tensor's own device is the tensor itself.",
        _return_argument,
        ("copy.copy-is-new-memory",),
    ),
    Mutant(
        "tensors.transfer-forgets-the-last",
        "The last of several tensors stays where it is.",
        _forget_last_of_transfer,
        ("containers.dict", "place.moves-everything"),
    ),
    Mutant(
        "tensors.seed-does-nothing",
        "The framework's random numbers go on as before.",
        _returns(None),
        ("create.seeds-everything",),
    ),
    Mutant(
        "models.members-forgets-the-last",
        "The last tensor of a model or an optimizer is neither moved nor saved.",
        _forget_last_member,
        ("mlp.parameters", "place.moves-everything"),
        is_optional=True,
    ),
    Mutant(
        "models.members-calls-all-trained",
        "A running mean and a frozen parameter are said to be trained.",
        _call_all_trained,
        ("show.buffers", "show.trained-numbers-change"),
        is_optional=True,
    ),
    Mutant(
        "models.list_attached-forgets-gradients",
        "The gradient of a parameter stays where it is.",
        _returns(()),
        ("place.moves-gradients",),
        is_optional=True,
    ),
    Mutant(
        "files.layers-swaps-two",
        "A file has the first two layers in the wrong order.",
        _swap_layers,
        ("io.layouts-are-known",),
        is_optional=True,
    ),
    Mutant(
        "files.prepare_state-does-nothing",
        "The state of an optimizer is read, and not restored.",
        _return_nothing_to_do,
        ("io.keeps-states-of-optimizers", "io.training-goes-on"),
        is_optional=True,
    ),
    Mutant(
        "strict.refuse_mixing-stays",
        "The framework's functions stay replaced after the last block.",
        _return_nothing_to_do,
        ("strict.leaves-nothing-patched",),
        is_optional=True,
    ),
    Mutant(
        "training.learner-trains-in-evaluate",
        "An evaluation is a step of training.",
        _change_learner(_train_in_evaluation),
        ("fit.evaluation-changes-nothing",),
        ("train",),
    ),
    Mutant(
        "training.learner-ignores-weights",
        "Each example counts the same in a step.",
        _change_learner(_forget_weights),
        ("train.weighs-examples",),
        ("train",),
    ),
    Mutant(
        "training.check_random_state-does-nothing",
        "A resumed run draws other random numbers.",
        _return_nothing_to_do,
        ("fit.resumes-random-numbers",),
        ("train",),
        is_optional=True,
    ),
    Mutant(
        "parallel.rows-takes-the-first",
        "Each shard of a batch has the batch's first examples.",
        _take_the_first,
        ("split.gives-each-its-part",),
    ),
    Mutant(
        "parallel.twin-shares-memory",
        "A copy of a model has the parameters of the original.",
        _copy_shallowly,
        ("replicate.shares-no-memory", "replicate.copies-models"),
        is_optional=True,
    ),
    Mutant(
        "parallel.batch_norms-finds-none",
        "Batch normalization of the wrong kind is not refused.",
        _returns(()),
        ("several.refuse-other-statistics",),
        # Other processes do not have the mutant.
        ("train", "train on several GPUs", "train on several GPUs in one process"),
        is_optional=True,
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _LIST}
"""The mutants by name, in the order of the areas."""
