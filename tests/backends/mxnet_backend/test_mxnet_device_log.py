"""What a log keeps of MXNet's scalars."""

from d2ldev_mxnet.framework import NumPySemantics, mx

import d2ldev


def test_a_loss_is_logged_without_what_it_was_recorded_from(backend):
    log = d2ldev.DeviceLog(backend, "gpu:0")
    weight = backend.ones(2, device="gpu:0")
    with NumPySemantics():
        weight.attach_grad()
        with mx.autograd.record():
            loss = (weight * 3).sum()
        log.add(loss=loss)
        loss.backward()
    (entry,) = log._pending
    assert entry.value is not loss
    assert backend.to_numpy(weight.grad).tolist() == [3.0, 3.0]
    assert log.last() == {"loss": 6.0}
