"""MXNet queues operations with their operands until memory is full; d2ldev bounds its own loops."""

import threading

import mxnet as mx
import numpy as np
import pytest

from d2ldev import DeviceLog, Trainer
from d2ldev.framework.testing import framework_of

STEPS = 40
_done = []


class Slow(mx.operator.CustomOp):
    """Reads a tensor once it may, and notes it."""

    may = threading.Event()

    def forward(self, is_train, req, in_data, out_data, aux):
        self.may.wait(60)
        _done.append(True)


@mx.operator.register("d2ldev_slow")
class SlowProperty(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Slow()


@pytest.fixture
def slow():
    """An operation that is queued, and ends only when ``Slow.may`` is set; soon it is."""
    _done.clear()
    Slow.may.clear()
    timer = threading.Timer(0.3, Slow.may.set)
    timer.start()
    yield lambda x: mx.nd.Custom(x.as_nd_ndarray(), op_type="d2ldev_slow").as_np_ndarray()
    timer.join()


def test_what_reads_a_tensor_is_done_when_it_was_waited_for(backend, slow):
    x = backend.ones(3)
    y = slow(x)
    assert _done == []
    framework_of(backend).tensors.wait_for_readers(x)
    assert _done == [True]
    del y


def test_what_is_computed_is_not_waited_for_though_something_reads_it(backend, slow):
    x = backend.ones(3)
    y = slow(x)
    framework_of(backend).tensors.wait(x)
    assert _done == []
    del y
    backend.synchronize()


def test_a_tensor_is_computed_when_it_was_waited_for(backend, slow):
    framework_of(backend).tensors.wait(slow(backend.ones(3)))
    assert _done == [True]


def test_a_log_lets_eight_steps_be_queued(backend, slow):
    log, queued, y = DeviceLog(backend), [], backend.zeros(1)
    for number in range(STEPS):
        y = slow(y)  # each step reads the step before, as training does: MXNet keeps their order
        log.add(loss=y.sum())
        queued.append(number + 1 - len(_done))
    assert max(queued) <= 8


def test_prefetching_lets_eight_steps_be_queued(backend, slow):
    batches = [{"x": backend.full((3,), number)} for number in range(STEPS)]
    queued, y = [], backend.zeros(3)
    for number, batch in enumerate(backend.prefetch(batches, "cpu")):
        y = slow(batch["x"] + y)
        queued.append(number + 1 - len(_done))
    assert max(queued) <= 8
    backend.synchronize()


def test_a_run_lets_eight_steps_be_queued(backend, monkeypatch):
    waited = []
    monkeypatch.setattr(type(framework_of(backend).tensors), "wait", lambda _, x: waited.append(x))
    batch = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    Trainer(1, backend=backend).fit(backend.mlp([2, 1]), [batch] * STEPS)
    assert len(waited) == STEPS // 4 - 1
