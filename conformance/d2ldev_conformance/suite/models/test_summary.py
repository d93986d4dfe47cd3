"""D2L 6.7.3: the table of a model's modules, as ``backend.summarize(net)`` returns it.

A user reads there how large a model is, what of it is trained, and where it is. A table that leaves
out a tensor, or counts one twice, hides what fills a GPU.
"""

from __future__ import annotations

import math

from d2ldev.framework.testing import framework_of
from d2ldev_conformance.provision import buffers, samples, ties
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"
SOURCE = "contract"


def _numbers(x):
    return math.prod(int(size) for size in x.shape)


@requirement("show.every-tensor-once", section=SECTION)
def test_a_summary_has_every_tensor_once(backend, place, sample):
    """Count each tensor of ``named_tensors`` once in ``summarize``, with its bytes and its device.

    The sum over the modules is then the size of the model.
    """
    obj = samples(backend)[sample](place)
    tensors = {id(x): x for x in backend.named_tensors(obj).values()}.values()
    total = backend.summarize(obj).total
    assert total.parameters + total.buffers == sum(map(_numbers, tensors))
    nbytes = framework_of(backend).tensors.nbytes
    assert sum(total.nbytes.values()) == sum(map(nbytes, tensors))
    assert total.nbytes.keys() == {backend.dtype_of(x) for x in tensors}
    assert total.devices == (place,)


@requirement("show.ties", section=SECTION)
def test_a_summary_counts_a_tie_once(backend, place, tied):
    """Count a tensor in several places once in ``summarize``."""
    build, list_places = ties(backend)[tied]
    obj = build(0, place)
    (shared, *_) = list_places(obj)
    tensors = {id(x): x for x in backend.named_tensors(obj).values()}.values()
    total = backend.summarize(obj).total
    assert total.parameters + total.buffers == sum(map(_numbers, tensors))
    assert total.parameters >= _numbers(shared)


@requirement("show.trained", section=SECTION)
def test_a_summary_tells_that_a_model_is_trained(backend, place):
    """Count every number of the model of ``mlp`` as a parameter that training changes."""
    total = backend.summarize(backend.mlp([3, 4, 1], device=place)).total
    assert (total.parameters, total.trained, total.buffers) == (21, 21, 0)


@requirement("show.buffers", section=SECTION)
def test_a_summary_counts_buffers_apart(backend, place, buffered):
    """Count tensors that are not trained, such as running means, as buffers."""
    build, list_buffers = buffers(backend)[buffered]
    obj = build(0, place)
    total = backend.summarize(obj).total
    assert total.buffers >= sum(map(_numbers, list_buffers(obj)))
    assert total.trained == total.parameters


@requirement("show.asks-only", section=SECTION)
def test_a_summary_asks_only(backend, place, sample, monkeypatch):
    """Copy nothing, read no value and wait for nothing in ``summarize``.

    A table of a model that is in training must not slow the training.
    """
    framework, called = framework_of(backend), []
    obj = samples(backend)[sample](place)
    backend.named_tensors(obj)  # what a framework looks up once
    work = {
        framework.tensors: ("transfer", "to_numpy", "full"),
        framework.devices: ("synchronize", "is_idle"),
    }
    with monkeypatch.context() as patch:
        for area, names in work.items():
            for name in names:
                patch.setattr(area, name, lambda *_, name=name, **__: called.append(name))
        str(backend.summarize(obj))
    assert called == []


@requirement("show.prints", section=SECTION)
def test_a_summary_is_a_table_as_text(backend, place):
    """Show the class, the numbers and the device of a model in the text of ``summarize``.

    A user prints it to see what fills a GPU.
    """
    net = backend.mlp([3, 4, 1], device=place)
    *_, total = str(backend.summarize(net)).splitlines()
    assert total.split() == ["total", "21", "21", "0", "<", "0.001", "float32", str(place)]
