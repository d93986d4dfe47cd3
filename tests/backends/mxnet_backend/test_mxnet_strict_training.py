"""strict() on MXNet: autograd, optimizers, losses, metrics, executors."""

import pytest
from d2ldev_mxnet.framework import mx

from d2ldev import DeviceMismatchError, gpu

# MXNet's own code warns of names that it has itself replaced.
pytestmark = [
    pytest.mark.usefixtures("set_np"),
    pytest.mark.filterwarnings("ignore:ndarray.*has been renamed:DeprecationWarning"),
]
np, nn = mx.np, mx.gluon.nn


def array(index, shape=(2, 3)):
    return np.ones(shape, ctx=mx.cpu(index))


def legacy(index, shape=(2, 3)):
    return mx.nd.ones(shape, ctx=mx.cpu(index))


# -- autograd -----------------------------------------------------------------------------


@pytest.fixture
def recorded():
    """A result on the first GPU, and what it was computed from."""
    x = array(1)
    x.attach_grad()
    with mx.autograd.record():
        y = x * x
    return x, y


def test_a_head_gradient_from_elsewhere_is_refused(backend, recorded):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        recorded[1].backward(array(2))
    assert "cannot run backward: " in str(caught.value)
    assert "head on gpu:0, head_grad on gpu:1" in str(caught.value)


def test_grad_with_a_head_gradient_from_elsewhere_is_refused(backend, recorded):
    x, y = recorded
    with backend.strict(), pytest.raises(DeviceMismatchError, match="head_grad on gpu:1"):
        mx.autograd.grad(y, [x], [array(2)])


def test_a_gradient_that_is_elsewhere_cannot_be_attached(backend):
    with backend.strict(), pytest.raises(DeviceMismatchError, match="gradient on gpu:1"):
        mx.autograd.mark_variables([array(1)], [array(2)])


def test_gradients_are_computed_where_they_were(backend, recorded):
    x, y = recorded
    with backend.strict():
        y.backward(array(1) * 3)
    assert backend.device_of(x.grad) is gpu(0)
    assert (x.grad.asnumpy() == 6).all()


def test_a_backward_pass_goes_through_explicit_moves(backend):
    x = array(1)
    x.attach_grad()
    with backend.strict():
        with mx.autograd.record():
            y = (backend.to(x, "gpu:1") * array(2)).sum()
        y.backward()
    assert (x.grad.asnumpy() == 1).all()


def test_losses_on_two_devices_go_backward_together(backend):
    arrays = [array(1), array(2)]
    for x in arrays:
        x.attach_grad()
    with backend.strict(), mx.autograd.record():
        mx.autograd.backward([x.sum() for x in arrays])
    assert [backend.device_of(x.grad) for x in arrays] == [gpu(0), gpu(1)]


class Custom(mx.autograd.Function):
    """A function whose forward and backward pass multiply by arrays of the caller's."""

    def __init__(self, forward, backward):
        super().__init__()
        self.factors = forward, backward

    def forward(self, x):
        return x * self.factors[0]

    def backward(self, gradient):
        return gradient * self.factors[1]


def run_custom(forward, backward):
    x = legacy(1)
    x.attach_grad()
    with mx.autograd.record():
        y = Custom(*[index and legacy(index) for index in (forward, backward)])(x)
    y.backward()
    return x.grad.asnumpy()


def test_a_custom_function_s_forward_pass_is_strict(backend):
    with backend.strict(), pytest.raises(DeviceMismatchError, match="mul"):
        run_custom(2, 1)


def test_a_custom_function_s_backward_pass_is_strict_in_mxnet_s_thread(backend, capfd):
    with pytest.raises(DeviceMismatchError, match="mul") as caught, backend.strict():
        run_custom(1, 2)
    assert isinstance(caught.value.__cause__, mx.base.MXNetError)


def test_a_custom_function_s_other_error_stays_itself(backend, capfd):
    with pytest.raises(mx.base.MXNetError), backend.strict():
        run_custom(1, None)


def test_a_custom_function_on_one_device_works(backend):
    with backend.strict():
        assert (run_custom(1, 1) == 1).all()


# -- training -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nag", "adam", "rmsprop", "adagrad", "signum", "ftrl"])
def test_an_update_with_a_gradient_from_elsewhere_is_refused(backend, name):
    optimizer = mx.optimizer.create(name)
    weight = legacy(1)
    state = optimizer.create_state(0, weight)
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        optimizer.update(0, weight, legacy(2), state)
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_an_update_with_a_state_from_elsewhere_is_refused(backend):
    optimizer = mx.optimizer.NAG(momentum=0.9)
    with backend.strict(), pytest.raises(DeviceMismatchError, match="mom on gpu:1"):
        optimizer.update(0, legacy(1), legacy(1), legacy(2))


def test_an_update_of_several_weights_at_once_is_refused(backend):
    optimizer = mx.optimizer.SGD(momentum=0.9)
    with backend.strict(), pytest.raises(DeviceMismatchError, match="multi_sgd_mom_update"):
        optimizer.update([0], [legacy(1)], [legacy(1)], [legacy(2)])


@pytest.mark.parametrize("contexts", [[mx.cpu(2)], [mx.cpu(1), mx.cpu(2)]], ids=str)
@pytest.mark.parametrize("store", ["local", "device", None])
def test_training_on_one_device_or_on_several_works(contexts, store, backend):
    def train():
        net = nn.Dense(1, in_units=3)
        net.initialize(mx.init.One(), ctx=contexts)
        trainer = mx.gluon.Trainer(net.collect_params(), "adam", kvstore=store)
        loss = mx.gluon.loss.L2Loss()
        for _ in range(3):
            with mx.autograd.record():
                batches = mx.gluon.utils.split_and_load(np.ones((4, 3)), contexts)
                losses = [loss(net(x), np.zeros((len(x), 1), ctx=x.ctx)) for x in batches]
            mx.autograd.backward(losses)
            trainer.step(4)
        return [x.asnumpy().tolist() for x in net.weight.list_data()]

    plain = train()
    with backend.strict():
        assert train() == plain


@pytest.mark.parametrize(
    "loss",
    [
        mx.gluon.loss.L1Loss(),
        mx.gluon.loss.L2Loss(),
        mx.gluon.loss.SigmoidBinaryCrossEntropyLoss(),
        mx.gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False),
        mx.gluon.loss.HuberLoss(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_refuses_labels_from_elsewhere(backend, loss):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        loss(array(1), array(2))
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


@pytest.mark.parametrize("metric", [mx.metric.Accuracy, mx.metric.MSE, mx.metric.CrossEntropy])
def test_a_metric_refuses_labels_from_elsewhere(backend, metric):
    labels, predictions = np.zeros((2,), ctx=mx.cpu(2)), array(1)
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        metric().update([labels], [predictions])
    assert str(caught.value).startswith(f"cannot run {metric.__name__}.update: ")


def test_a_metric_takes_pairs_of_several_devices(backend):
    metric = mx.metric.MAE()
    with backend.strict():
        metric.update([array(1), array(2)], [array(1), array(2)])
    assert metric.get()[1] == 0


# -- executors ----------------------------------------------------------------------------


def test_an_executor_refuses_arguments_from_elsewhere(backend):
    total = mx.sym.var("a") + mx.sym.var("b")
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        total.bind(mx.cpu(1), [legacy(1), legacy(2)])
    assert "ctx on gpu:0, args[0] on gpu:0, args[1] on gpu:1" in str(caught.value)


def test_an_executor_for_another_context_is_refused(backend):
    with backend.strict(), pytest.raises(DeviceMismatchError, match="ctx on gpu:1"):
        (mx.sym.var("a") * 2).bind(mx.cpu(2), [legacy(1)])


def test_an_executor_on_one_device_runs(backend):
    with backend.strict():
        executor = (mx.sym.var("a") * 2).bind(mx.cpu(2), [legacy(2)], [legacy(2)])
        assert backend.device_of(executor.forward(is_train=True)[0]) is gpu(1)
        executor.backward([legacy(2)])
    assert (executor.grad_arrays[0].asnumpy() == 2).all()
