"""``place`` of arrays with gradients that belong to no block, as the book has them."""

import mxnet as mx
import pytest
from numpy_semantics import NumPySemantics

from d2ldev import gpu
from d2ldev.framework.testing import framework_of


def scratch(backend, request="write", steps=1):
    """Return a weight and a bias with gradients, after ``steps`` backward passes."""
    parameters = [backend.full((3, 1), 0.5), backend.zeros(1)]
    for parameter in parameters:
        parameter.attach_grad(request)
    for _ in range(steps):
        backward(backend, parameters)
    return parameters


def backward(backend, parameters):
    weight, bias = parameters
    x = backend.ones((4, 3), device=backend.device_of(weight))
    with NumPySemantics():
        with mx.autograd.record():
            loss = (mx.np.dot(x, weight) + bias).sum()
        loss.backward()


@pytest.mark.parametrize(
    "container", [list, tuple, lambda pair: dict(zip("wb", pair, strict=True))]
)
def test_a_container_of_them_comes_back_itself_with_the_same_arrays(backend, container):
    parameters = scratch(backend)
    contained = container(parameters)
    assert backend.place(contained, "gpu:1") is contained
    assert [x.ctx for x in parameters] == [mx.cpu(2)] * 2


@pytest.mark.parametrize(("request_", "expected"), [("write", 4.0), ("add", 12.0)])
def test_gradients_go_on_being_added_or_overwritten(backend, request_, expected):
    parameters = backend.place(scratch(backend, request_, steps=2), "gpu:0")
    backward(backend, parameters)
    assert backend.to_numpy(parameters[1].grad).tolist() == [expected]


@pytest.mark.parametrize("request_", ["write", "add"])
def test_gradients_that_are_zero_go_on_too(backend, request_):
    parameters = backend.place(scratch(backend, request_, steps=0), "gpu:0")
    for _ in range(2):
        backward(backend, parameters)
    assert backend.to_numpy(parameters[1].grad).tolist() == [4.0 if request_ == "write" else 8.0]


def test_a_gradient_that_waits_still_waits(backend):
    weight, _ = backend.place(scratch(backend), "gpu:0")
    assert weight._fresh_grad


def test_an_array_without_a_gradient_gets_none(backend):
    parameters, buffer = scratch(backend), backend.ones(2)
    placed = backend.place({"parameters": parameters, "buffer": buffer}, "gpu:0")
    assert placed["buffer"].grad is None
    assert placed["buffer"].ctx == mx.cpu(1)
    assert buffer.ctx == mx.cpu(0)


def test_they_are_placed_there_and_back(backend):
    parameters = scratch(backend, "add")
    backend.place(backend.place(parameters, "gpu:0"), "cpu")
    backward(backend, parameters)
    assert backend.to_numpy(parameters[1].grad).tolist() == [8.0]


def test_a_gradient_is_named_and_is_one_object_while_it_is_held(backend):
    parameters = scratch(backend)
    named = backend.named_tensors(parameters, gradients=True)
    assert list(named) == ["0", "1", "0.grad", "1.grad"]
    again = backend.named_tensors(parameters, gradients=True)
    assert all(again[name] is x for name, x in named.items())


def test_a_gradient_is_not_taken_for_another_one(backend):
    one, other = scratch(backend), scratch(backend, steps=0)
    named = backend.named_tensors({"one": one, "other": other}, gradients=True)
    assert backend.to_numpy(named["one.0.grad"]).sum() == 12.0
    assert backend.to_numpy(named["other.0.grad"]).sum() == 0.0


def test_a_legacy_array_is_placed_with_its_gradient(backend):
    x = mx.nd.ones((2,))
    x.attach_grad()
    with mx.autograd.record():
        y = x * 3
    y.backward()
    assert backend.place([x], "gpu:0")[0] is x
    assert x.grad.asnumpy().tolist() == [3.0, 3.0]
    assert x.grad.context == mx.cpu(1)


@pytest.mark.parametrize("shape", [(), (0,)])
def test_arrays_of_every_shape_are_placed_with_their_gradients(backend, shape):
    x = backend.ones(shape)
    with NumPySemantics():
        x.attach_grad()
    backend.place([x], "gpu:0")
    assert backend.device_of(x) is gpu(0)
    assert backend.to_numpy(x.grad).shape == shape


def test_a_failure_leaves_gradients_alone(backend, monkeypatch):
    parameters = scratch(backend)
    monkeypatch.setattr(framework_of(backend).tensors, "transfer", None)
    with pytest.raises(TypeError):
        backend.place(parameters, "gpu:0")
    assert parameters[0].ctx == mx.cpu(0)
    assert backend.to_numpy(parameters[0].grad).tolist() == [[4.0]] * 3
