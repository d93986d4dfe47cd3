"""What a log keeps of torch's scalars: the value, and not what it hangs on."""

import pytest
import torch

from d2ldev import DeviceLog, UnsupportedValueError


@pytest.fixture
def log(torch_backend):
    return DeviceLog(torch_backend, "cpu")


def test_a_loss_does_not_keep_its_graph(log):
    log.add(loss=(torch.ones(4, requires_grad=True) * 2).sum())
    assert log._pending[0].value.grad_fn is None
    assert log.last() == {"loss": 8.0}


def test_one_number_of_a_large_tensor_does_not_keep_the_rest(log):
    log.add(first=torch.ones(1000)[0])
    (entry,) = log._pending
    assert entry.value.untyped_storage().nbytes() == 4


def test_a_scalar_of_its_own_is_not_copied(log):
    x = torch.tensor(1.0)
    log.add(loss=x)
    assert log._pending[0].value.data_ptr() == x.data_ptr()


def test_the_users_tensor_keeps_its_graph(log):
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    log.add(loss=loss)
    loss.backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_half_precision_and_single_may_be_mixed(log):
    log.add(loss=torch.tensor(0.5, dtype=torch.bfloat16), accuracy=torch.tensor(0.25))
    assert log.last() == {"loss": 0.5, "accuracy": 0.25}


def test_a_tensor_without_values_is_refused(log):
    with pytest.raises(UnsupportedValueError, match="log loss"):
        log.add(loss=torch.ones((), device="meta"))
