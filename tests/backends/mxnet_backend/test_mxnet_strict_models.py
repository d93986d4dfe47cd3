"""strict() on MXNet: Gluon's blocks, hybridized and not."""

import pytest
from d2ldev_mxnet.framework import mx

from d2ldev import DeviceMismatchError, gpu

# MXNet's own code warns of names that it has itself replaced, and of types that it infers.
pytestmark = [
    pytest.mark.usefixtures("set_np"),
    pytest.mark.filterwarnings("ignore:ndarray.*has been renamed:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning"),
]
np, nn, rnn = mx.np, mx.gluon.nn, mx.gluon.rnn


def array(index, shape=(2, 3)):
    return np.ones(shape, ctx=mx.cpu(index))


LAYERS = {
    "Dense": (lambda: nn.Dense(2, in_units=3), (2, 3)),
    "deferred Dense": (lambda: nn.Dense(2), (2, 3)),
    "Conv2D": (lambda: nn.Conv2D(2, 3, in_channels=1), (1, 1, 5, 5)),
    "BatchNorm": (lambda: nn.BatchNorm(in_channels=3), (2, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(in_channels=3), (2, 3)),
    "Embedding": (lambda: nn.Embedding(4, 2), (2, 3)),
    "PReLU": (nn.PReLU, (2, 3)),
    "LSTM": (lambda: rnn.LSTM(2, input_size=3), (4, 2, 3)),
    "GRU": (lambda: rnn.GRU(2, input_size=3), (4, 2, 3)),
    "Sequential": (lambda: sequential(nn.Sequential()), (2, 3)),
    "HybridSequential": (lambda: sequential(nn.HybridSequential()), (2, 3)),
}


def sequential(net):
    net.add(nn.Dense(4, in_units=3), nn.Dropout(0.5), nn.Dense(2, in_units=4))
    return net


@pytest.fixture(params=LAYERS.values(), ids=LAYERS)
def layer(request):
    make, shape = request.param
    block = make()
    block.initialize(ctx=mx.cpu(1))
    return block, shape


HYBRID = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


def test_a_layer_refuses_an_input_from_elsewhere(backend, layer):
    block, shape = layer
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        block(array(2, shape))
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_a_layer_on_one_device_computes_what_it_did(backend, layer):
    block, shape = layer
    plain = block(array(1, shape))
    with backend.strict():
        strict = block(array(1, shape))
    assert backend.device_of(strict) is gpu(0)
    assert (plain.asnumpy() == strict.asnumpy()).all()


@pytest.mark.parametrize("settings", HYBRID, ids=str)
@pytest.mark.parametrize("is_recording", [False, True])
def test_a_hybridized_block_refuses_an_input_from_elsewhere(backend, settings, is_recording):
    net = sequential(nn.HybridSequential())
    net.initialize(ctx=mx.cpu(1))
    net.hybridize(**settings)
    net(array(1))
    recording = mx.autograd.record if is_recording else mx.autograd.pause
    with backend.strict(), recording(), pytest.raises(DeviceMismatchError) as caught:
        net(array(2))
    assert str(caught.value).startswith("cannot run HybridSequential: ")
    assert "data = backend.to(data, 'gpu:0')" in str(caught.value)
    assert isinstance(caught.value.__cause__, mx.base.MXNetError)


@pytest.mark.parametrize("settings", HYBRID, ids=str)
def test_a_hybridized_block_on_one_device_computes_what_it_did(backend, settings):
    net = sequential(nn.HybridSequential())
    net.initialize(ctx=mx.cpu(2))
    net.hybridize(**settings)
    plain = net(array(2))
    with backend.strict():
        strict = net(array(2))
    assert backend.device_of(strict) is gpu(1)
    assert (plain.asnumpy() == strict.asnumpy()).all()


class Sum(nn.HybridBlock):
    def hybrid_forward(self, _operators, x, y):
        return x + y


@pytest.mark.parametrize("is_hybridized", [False, True])
def test_inputs_of_two_devices_are_refused(backend, is_hybridized):
    block = Sum()
    block.hybridize(is_hybridized)
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        block(array(1), array(2))
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_the_parameter_and_the_input_are_named(backend):
    block = nn.Dense(2, in_units=3, prefix="output_")
    block.initialize(ctx=mx.cpu(1))
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        block(array(2))
    assert "cannot run Dense: " in str(caught.value)
    assert "output_weight on gpu:0, x on gpu:1" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_state_from_elsewhere_is_refused(backend):
    layer = rnn.LSTM(2, input_size=3)
    layer.initialize(ctx=mx.cpu(1))
    states = layer.begin_state(2, ctx=mx.cpu(2))
    with backend.strict(), pytest.raises(DeviceMismatchError, match="state"):
        layer(array(1, (4, 2, 3)), states)


def test_a_symbol_block_refuses_an_input_from_elsewhere(backend):
    x = mx.sym.var("x").as_np_ndarray()
    block = mx.gluon.SymbolBlock(x * mx.sym.var("w").as_np_ndarray(), [x])
    block.params["w"].shape = (3,)
    block.initialize(ctx=mx.cpu(1))
    with backend.strict(), pytest.raises(DeviceMismatchError, match="w on gpu:0, x on gpu:1"):
        block(array(2))


def test_another_error_of_a_block_stays_itself(backend):
    with backend.strict(), pytest.raises(RuntimeError, match="has not been initialized") as caught:
        nn.Dense(2, in_units=3)(array(1))
    assert not isinstance(caught.value, DeviceMismatchError)


def test_parameters_are_set_from_anywhere(backend):
    block = nn.Dense(2, in_units=3)
    block.initialize(ctx=mx.cpu(1))
    with backend.strict():
        block.weight.set_data(array(2, (2, 3)))
        block.bias.initialize(mx.init.Constant(array(0, (2,))), force_reinit=True, ctx=mx.cpu(1))
        assert (block(array(1)).asnumpy() == 4).all()
