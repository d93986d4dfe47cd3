"""``DeviceLog``: what the conformance suite does not ask of every backend."""

import math
import threading

import numpy as np
import pytest

import d2ldev
from d2ldev import DeviceLog, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev.training.log import BatchedDeviceLog


@pytest.fixture
def log(reference):
    return DeviceLog(reference, "gpu:0")


@pytest.fixture
def scalar(reference):
    def make(value, dtype=None):
        return reference.full((), value, dtype=dtype, device="gpu:0")

    return make


def test_an_empty_log_has_nothing(log):
    assert (log.flush(), log.means(), log.last()) == ({}, {}, {})


def test_values_read_by_means_are_flushed_too(log, scalar):
    log.add(loss=scalar(1.0))
    log.means()
    log.add(loss=scalar(3.0))
    assert log.flush() == {"loss": [1.0, 3.0]}
    assert log.means() == {"loss": 2.0}


def test_without_values_there_is_nothing_to_flush(reference, scalar):
    log = DeviceLog(reference, values=False)
    log.add(loss=scalar(1.0))
    with pytest.raises(UnsupportedValueError, match="values=False"):
        log.flush()
    assert (log.means(), log.last()) == ({"loss": 1.0}, {"loss": 1.0})


def test_without_values_the_host_keeps_none(reference):
    log = DeviceLog(reference, max_pending=2, values=False)
    for number in range(100):
        log.add(lr=number)
    assert log.last() == {"lr": 99.0}
    own = [kept for kept in vars(log).values() if kept is not framework_of(reference).state.kinds]
    assert not any(isinstance(kept, (dict, list)) and len(kept) > 4 for kept in own)


def test_names_need_not_come_together(log, scalar):
    log.add(loss=scalar(1.0))
    log.add(accuracy=scalar(0.5))
    log.add(loss=scalar(2.0), accuracy=scalar(1.0))
    assert log.flush() == {"loss": [1.0, 2.0], "accuracy": [0.5, 1.0]}


def test_a_scalar_may_have_any_name(log, scalar):
    log.add(2, weight=scalar(1.0), self=scalar(2.0), name=scalar(3.0))
    assert log.last() == {"weight": 1.0, "self": 2.0, "name": 3.0}


def test_numbers_alone_are_bounded_too(reference):
    log = DeviceLog(reference, max_pending=2)
    for number in range(100):
        log.add(lr=number)
    assert len(log._pending) < 4
    assert log.means() == {"lr": 49.5}


def test_calls_that_are_left_out_look_at_nothing(reference):
    log = DeviceLog(reference, every=2)
    log.add(loss=1.0)
    log.add(loss="not looked at")
    assert log.flush() == {"loss": [1.0]}


def test_calls_that_are_left_out_count_in_no_mean(reference):
    log = DeviceLog(reference, every=2)
    for weight, value in ((1, 2.0), (100, 50.0), (3, 6.0)):
        log.add(weight, loss=value)
    assert log.means() == {"loss": 5.0}


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", None], ids=repr)
def test_an_invalid_weight_is_refused(log, scalar, weight):
    with pytest.raises(UnsupportedValueError, match="weight"):
        log.add(weight, loss=scalar(1.0))
    assert log.flush() == {}


def test_a_weight_may_be_numpys(log, scalar):
    log.add(np.int64(2), loss=scalar(1.0))
    assert log.means() == {"loss": 1.0}


def test_without_any_weight_the_mean_is_not_a_number(log, scalar):
    log.add(0, loss=scalar(1.0))
    assert math.isnan(log.means()["loss"])


def test_a_nan_without_weight_does_not_change_the_mean(log, scalar):
    log.add(0, loss=scalar(float("nan")))
    log.add(1, loss=scalar(2.0))
    assert log.means() == {"loss": 2.0}


def test_a_nan_is_shown(log, scalar):
    log.add(loss=scalar(float("nan")))
    assert math.isnan(log.last()["loss"])


def test_a_refused_value_leaves_nothing_of_its_call(log, scalar):
    with pytest.raises(UnsupportedValueError):
        log.add(loss=scalar(1.0), accuracy=None)
    assert log.flush() == {}


def test_a_refused_value_does_not_choose_the_device(reference, scalar):
    log = DeviceLog(reference)
    with pytest.raises(UnsupportedValueError):
        log.add(loss=scalar(1.0), accuracy=None)
    log.add(loss=reference.full((), 2.0, device="cpu"))
    assert log.last() == {"loss": 2.0}


def test_a_tensor_of_another_backend_is_refused(log):
    with pytest.raises(UnsupportedValueError, match="neither a scalar tensor nor a number"):
        log.add(loss=d2ldev.cpu())


def test_a_number_that_no_float_can_be_is_refused(log):
    with pytest.raises(UnsupportedValueError, match="loss"):
        log.add(loss=10**400)


def test_wide_integers_keep_their_digits_beside_other_dtypes(log, scalar):
    log.add(loss=scalar(0.5), seen=scalar(2**40 + 1, "int64"))
    assert log.last() == {"loss": 0.5, "seen": 2.0**40 + 1}


def test_values_that_could_not_be_copied_stay_in_the_log(log, scalar, reference, monkeypatch):
    log.add(loss=scalar(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(framework_of(reference).tensors, "stack", lambda xs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            log.flush()
    assert log.flush() == {"loss": [1.0]}


def test_a_log_takes_the_handle_as_its_backend(reference):
    with d2ldev.use_backend(reference):
        log = DeviceLog(d2ldev.backend, "gpu:0")
        log.add(loss=reference.full((), 1.0, device="gpu:0"))
        assert log.last() == {"loss": 1.0}


def test_no_device_is_needed_that_exists_until_something_is_added(reference):
    with pytest.raises(UnsupportedValueError, match="gpu:0"):
        DeviceLog(reference, "gpu:7").add(loss=reference.full((), 1.0, device="gpu:0"))


def test_reading_while_another_thread_adds_loses_nothing(reference, scalar):
    log = DeviceLog(reference, max_pending=3)
    value = scalar(1.0)

    def work():
        for _ in range(200):
            log.add(loss=value)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        log.means()
    thread.join()
    log.add(200, loss=scalar(3.0))
    assert log.means() == {"loss": 2.0}


@pytest.mark.parametrize("number", [0, 1, 2, 16, 17, 40])
def test_the_log_of_a_loop_has_the_values_added_in_blocks(reference, scalar, number):
    log, plain = BatchedDeviceLog(reference), DeviceLog(reference)
    for value in range(number):
        for each in (log, plain):
            each.add(value + 1, loss=scalar(float(value)))
    assert log.state_dict() == plain.state_dict()
    assert (log.means(), log.last()) == (plain.means(), plain.last())


@pytest.mark.parametrize("ask", ["means", "last", "state_dict"])
def test_reading_the_log_of_a_loop_includes_the_whole_block(reference, scalar, ask):
    log, plain = BatchedDeviceLog(reference), DeviceLog(reference)
    for value in (1.0, 3.0, 8.0):
        log.add(loss=scalar(value))
        plain.add(loss=scalar(value))
    assert getattr(log, ask)() == getattr(plain, ask)()


def test_the_first_numbers_of_a_loop_are_checked_at_once(reference):
    with pytest.raises(UnsupportedValueError, match=r"shape \(2,\), and not a scalar"):
        BatchedDeviceLog(reference).add(loss=reference.ones(2))


def test_a_loss_on_another_device_in_a_loop_is_refused(reference, scalar):
    log = BatchedDeviceLog(reference)
    log.add(loss=scalar(1.0))
    log.add(loss=reference.full((), 1.0, device="gpu:1"))
    with pytest.raises(UnsupportedValueError, match="it is on gpu:1, and the log on gpu:0"):
        log.means()


def test_later_numbers_of_a_loop_are_checked_when_somebody_asks(reference, scalar):
    log = BatchedDeviceLog(reference)
    log.add(loss=scalar(1.0))
    log.add(accuracy=reference.ones(2, device="gpu:0"))
    with pytest.raises(UnsupportedValueError, match=r"shape \(2,\), and not a scalar"):
        log.means()
