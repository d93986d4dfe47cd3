"""D2L 6.7.5, the third exercise: a log that stays on the device until it is read.

The book asks what it costs to log one number at a time. Reading each number makes the GPU wait, so
the log stays on the device.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from d2ldev import DeviceLog, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.5"
SOURCE = "contract, Logs"
# The methods that bring values to the host, or anything from one device to another.
TRANSFERS = ("to_numpy", "transfer", "from_data")


@pytest.fixture
def scalar(backend, place):
    """Makes a scalar on the device."""

    def make(value, dtype=None):
        return backend.full((), value, dtype=dtype, device=place)

    return make


@pytest.fixture
def transfers(backend, monkeypatch):
    """The names of the transfers that were made, one for each call from outside."""
    made, depth = [], []

    def count(name, method):
        def call(*args, **options):
            if not depth:
                made.append(name)
            depth.append(name)
            try:
                return method(*args, **options)
            finally:
                depth.pop()

        return call

    tensors = framework_of(backend).tensors
    for name in TRANSFERS:
        monkeypatch.setattr(tensors, name, count(name, getattr(tensors, name)))
    return made


@requirement("log.means", section=SECTION)
def test_means_are_weighted(backend, place, scalar):
    """Return means that are weighted by the numbers of examples.

    The last batch is smaller.
    """
    log = DeviceLog(backend, place)
    log.add(1, loss=scalar(4.0), accuracy=scalar(1.0))
    log.add(3, loss=scalar(8.0), accuracy=scalar(0.0))
    assert log.means() == {"loss": 7.0, "accuracy": 0.25}


@requirement("log.last", section=SECTION)
def test_the_last_values_are_those_added_last(backend, place, scalar):
    """Return the last value of each name."""
    log = DeviceLog(backend, place)
    for value in (3.0, 1.0, 2.5):
        log.add(loss=scalar(value))
    log.add(accuracy=scalar(0.5))
    assert log.last() == {"loss": 2.5, "accuracy": 0.5}


@requirement("log.flush", section=SECTION)
def test_flushing_gives_the_values_in_their_order_once(backend, place, scalar):
    """Return all values in their order once, and keep counting the means."""
    log = DeviceLog(backend, place)
    for value in (3.0, 1.0, 2.0):
        log.add(loss=scalar(value), half=scalar(value / 2))
    assert log.flush() == {"loss": [3.0, 1.0, 2.0], "half": [1.5, 0.5, 1.0]}
    assert log.flush() == {}
    assert log.means() == {"loss": 2.0, "half": 1.0}


@requirement("log.add-transfers-nothing", section=SECTION, source="D2L")
def test_adding_copies_nothing_to_the_host(backend, place, scalar, transfers):
    """Transfer nothing when a value is added."""
    values = [scalar(float(number)) for number in range(20)]
    transfers.clear()
    log = DeviceLog(backend, place)
    for value in values:
        log.add(loss=value, again=value)
    assert transfers == []


@requirement("log.one-transfer", section=SECTION, source="D2L")
@pytest.mark.parametrize("number", [1, 2, 100])
def test_flushing_is_one_transfer(backend, place, scalar, transfers, number):
    """Read all waiting values in one transfer.

    Each transfer waits for the GPU.
    """
    log = DeviceLog(backend, place)
    for value in range(number):
        log.add(loss=scalar(float(value)), accuracy=scalar(float(value)))
    transfers.clear()
    assert len(log.flush()["loss"]) == number
    assert transfers == ["to_numpy"]


@requirement("log.stays-on-the-device", section=SECTION)
def test_a_value_of_another_device_is_refused_and_not_moved(backend, route):
    """Refuse a value of another device.

    A silent move would be the transfer that the log avoids.
    """
    source, target = route
    log = DeviceLog(backend, target)
    with pytest.raises(UnsupportedValueError, match=str(source)):
        log.add(loss=backend.full((), 1.0, device=source))
    assert log.means() == {}


@requirement("log.first-device", section=SECTION)
def test_without_a_device_it_is_that_of_the_first_value(backend, route):
    """Use the device of the first value if none is given."""
    source, target = route
    log = DeviceLog(backend)
    log.add(loss=backend.full((), 1.0, device=source))
    with pytest.raises(UnsupportedValueError, match=str(target)):
        log.add(loss=backend.full((), 2.0, device=target))
    assert log.means() == {"loss": 1.0}


@requirement("log.bounded", section=SECTION)
def test_at_most_depth_batches_wait_on_the_device(backend, place, scalar, transfers):
    """Let at most ``max_pending`` calls wait on the device.

    A long run would fill the GPU with numbers.
    """
    log = DeviceLog(backend, place, max_pending=4)
    values = [scalar(float(number)) for number in range(10)]
    transfers.clear()
    for value in values:
        log.add(loss=value, again=value)
    assert transfers == ["to_numpy"] * 5
    assert log.means() == {"loss": 4.5, "again": 4.5}


@requirement("log.loses-nothing", section=SECTION)
def test_everything_that_was_added_is_flushed(backend, place, scalar):
    """Return each of 3,000 values that were added, in order.

    The log reads in blocks, and a block may be lost at its edge.
    """
    log = DeviceLog(backend, place)
    values = [scalar(float(number)) for number in range(7)]
    for number in range(3000):
        log.add(loss=values[number % 7], step=number)
    steps = [float(number) for number in range(3000)]
    assert log.flush() == {"loss": [step % 7 for step in steps], "step": steps}


@requirement("log.every", section=SECTION)
def test_only_every_nth_call_is_kept(backend, place, scalar):
    """Keep the first call and each n-th one after it with ``every=n``."""
    log = DeviceLog(backend, place, every=3)
    for value in range(7):
        log.add(loss=scalar(float(value)))
    assert log.flush() == {"loss": [0.0, 3.0, 6.0]}


@requirement("log.mixed-dtypes", section=SECTION)
def test_dtypes_may_differ_from_value_to_value(backend, place, scalar):
    """Accept values whose dtypes differ from call to call.

    Mixed precision changes the dtype of a loss in a run.
    """
    names = [name for name in backend.dtype_names if not name.startswith("complex")]
    log = DeviceLog(backend, place)
    for weight, name in enumerate(names, start=1):
        log.add(weight, loss=scalar(0.5), one=backend.asarray(1, dtype=name, device=place))
    assert log.means() == {"loss": 0.5, "one": 1.0}


@requirement("log.every-dtype", section=SECTION)
def test_values_of_any_real_dtype_are_kept(backend, place):
    """Accept each real dtype that the backend has."""
    names = [name for name in backend.dtype_names if not name.startswith("complex")]
    for name in names:
        log = DeviceLog(backend, place)
        log.add(one=backend.asarray(1, dtype=name, device=place))
        assert log.means() == {"one": 1.0}, name


@requirement("log.wide-integers", section=SECTION)
def test_large_numbers_of_one_dtype_are_exact(backend, place, scalar):
    """Keep integers exactly that float32 cannot hold.

    Counts of tokens go beyond 2**24 in minutes.
    """
    log = DeviceLog(backend, place)
    log.add(seen=scalar(2**30 + 1, "int32"))
    assert log.last() == {"seen": 2.0**30 + 1}


@requirement("log.numbers", section=SECTION)
def test_numbers_of_the_host_are_taken_too(backend, place, transfers):
    """Accept Python's and NumPy's numbers without a transfer.

    A learning rate is a number of the host.
    """
    log = DeviceLog(backend, place)
    for lr in (0.5, np.float32(0.25), np.array(0.75), 1, True):
        log.add(lr=lr)
    assert log.flush() == {"lr": [0.5, 0.25, 0.75, 1.0, 1.0]}
    assert transfers == []


@requirement("log.scalars-only", section=SECTION)
@pytest.mark.parametrize("shape", [(1,), (2,), (0,), (1, 1)], ids=str)
def test_a_value_that_is_not_a_scalar_is_refused_by_name(backend, place, scalar, shape):
    """Refuse a tensor that is not a scalar, by its name.

    A mean over rows is the caller's decision.
    """
    log = DeviceLog(backend, place)
    with pytest.raises(UnsupportedValueError, match="losses"):
        log.add(loss=scalar(1.0), losses=backend.ones(shape, device=place))
    assert log.means() == {}


@requirement("log.scalars-only", section=SECTION)
@pytest.mark.parametrize("value", [None, "0.5", [0.5], 1j, np.ones(2)], ids=repr)
def test_a_value_that_is_not_a_number_is_refused_by_name(backend, place, value):
    """Refuse a value that is not a real number, by its name.

    A text fails only when the log is read, hours later.
    """
    with pytest.raises(UnsupportedValueError, match="loss"):
        DeviceLog(backend, place).add(loss=value)


@requirement("log.real-numbers-only", section=SECTION)
def test_complex_numbers_are_refused_and_no_others(backend, place):
    """Refuse complex numbers, and no other dtype.

    Python floats hold the result.
    """
    log = DeviceLog(backend, place)
    log.add(first=1.0)
    refused = []
    for name in backend.dtype_names:
        x = backend.asarray(1, dtype=name, device=place)
        try:
            log.add(**{name: x})
        except UnsupportedValueError:
            refused.append(name)
    assert refused == [name for name in backend.dtype_names if name.startswith("complex")]
    assert log.last().keys() == {"first", *backend.dtype_names} - {*refused}


@requirement("log.trained-values", section=SECTION)
def test_the_losses_of_training_can_be_logged(backend, place):
    """Return the losses of a training as the learner computed them."""
    net = backend.mlp([2, 1], device=place)
    learner = backend.learner(net, lr=0.1)
    x, y = backend.ones((4, 2), device=place), backend.zeros((4, 1), device=place)
    log = DeviceLog(backend, place)
    losses = []
    for _ in range(3):
        loss, _ = learner.step((x,), y)
        log.add(4, loss=loss)
        losses.append(float(backend.to_numpy(loss)))
    assert log.flush() == {"loss": losses}


@requirement("log.threads", section=SECTION)
def test_threads_may_add_to_one_log(backend, place, scalar):
    """Keep each value that threads add at once.

    Callbacks may run beside the loop.
    """
    log = DeviceLog(backend, place, max_pending=8)
    values = [scalar(float(number)) for number in range(25)]

    def work():
        for value in values:
            log.add(loss=value)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.add(100, loss=scalar(12.0))
    assert log.means() == {"loss": 12.0}


@requirement("log.bad-arguments", section=SECTION)
@pytest.mark.parametrize("name", ["every", "max_pending"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None], ids=repr)
def test_a_value_that_is_not_a_positive_integer_is_refused(backend, name, value):
    """Refuse ``every`` and ``max_pending`` that are not positive integers.

    ``every=0`` would divide by zero in the middle of a run.
    """
    with pytest.raises(UnsupportedValueError, match=name):
        DeviceLog(backend, **{name: value})
