"""strict() on MXNet: operators, indexing, Gluon's blocks, and training."""

import operator
import os
import subprocess
import sys

import mxnet as mx
import numpy
import pytest

import d2ldev
from d2ldev import DeviceMismatchError, UnsupportedValueError, gpu
from d2ldev.framework.testing import framework_of

# MXNet's own code warns of names that it has itself replaced, and of types that it infers.
pytestmark = [
    pytest.mark.usefixtures("set_np"),
    pytest.mark.filterwarnings("ignore:ndarray.*has been renamed:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning"),
]
np, nd, nn, rnn = mx.np, mx.nd, mx.gluon.nn, mx.gluon.rnn


def array(index, shape=(3, 3)):
    return np.ones(shape, ctx=mx.cpu(index))


def legacy(index, shape=(3, 3)):
    return nd.ones(shape, ctx=mx.cpu(index))


def mix(backend, call, *operands):
    """Return the error of a call in a strict block; the same call outside of it is none."""
    call(*operands)
    return refuse(backend, call, *operands)


def refuse(backend, call, *operands):
    """Return the error of a call in a strict block."""
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        call(*operands)
    return caught.value


@pytest.mark.parametrize("name", ["add", "truediv", "mod", "eq", "le", "iadd"])
def test_an_operator_of_python_is_refused_with_legacy_arrays(backend, name):
    error = mix(backend, getattr(operator, name), legacy(1), legacy(2))
    assert error.devices == ("gpu:0", "gpu:1")


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda x, y: np.take(x, y), "take"),
        (lambda x, y: np.tensordot(x, y), "tensordot"),
        (lambda x, y: np.stack([x, y]), "stack"),
        (lambda x, y: np.einsum("ij,jk->ik", x, y), "einsum"),
        (lambda x, y: np.where(x > 0, x, y), "where"),
        (lambda x, y: np.add(x, x, out=y), "add"),
        (lambda x, y: mx.npx.pick(x, y[0]), "pick"),
        (lambda x, y: mx.npx.fully_connected(x, y, None, num_hidden=3, no_bias=True), None),
        (lambda x, y: mx.npx.reshape_like(x, y), "reshape_like"),
        (lambda x, y: x.dot(y), "dot"),
        (lambda x, y: np.linalg.solve(x + np.eye(3, ctx=x.ctx), y), "solve"),
        (lambda x, y: np.random.normal(x, y), None),
        (lambda x, y: numpy.add(x, y), "add"),
        (lambda x, y: numpy.concatenate([x, y]), "concatenate"),
    ],
)
def test_other_functions_of_np_are_refused_by_name(backend, call, operation):
    error = mix(backend, call, array(1), array(2))
    assert f"cannot run {operation or ''}" in str(error)


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (lambda x, y: nd.concatenate([x, y], axis=1), "slice_assign"),
        (lambda x, y: nd.sparse.dot(x.tostype("csr"), y), "dot"),
        (lambda x, y: nd.contrib.allclose(x, y), "allclose"),
        (lambda x, y: nd.sgd_update(x, y, lr=0.1), "sgd_update"),
        (lambda x, y: nd.random.normal(x, y), "sample_normal"),
    ],
)
def test_other_legacy_functions_are_refused_by_name(backend, call, operation):
    error = mix(backend, call, legacy(1), legacy(2))
    assert f"cannot run {operation}: " in str(error)


@pytest.mark.parametrize("make", [array, legacy])
@pytest.mark.parametrize("key", [slice(None), 0, (slice(None), 1), [0, 2]], ids=str)
def test_assignment_is_an_explicit_copy(backend, make, key):
    x, y = make(1), make(2) * 2
    with backend.strict():
        x[key] = y[key]
    assert backend.device_of(x) is gpu(0)
    assert (x[key].asnumpy() == 2).all()


@pytest.mark.parametrize("make", [array, legacy])
def test_an_index_on_another_device_is_refused(backend, make):
    x, index = make(1), make(2)[0].astype("int32")
    assert "index on gpu:1" in str(refuse(backend, lambda: x[index]))
    assert "index" in str(refuse(backend, lambda: x[index, 0:2]))
    assert "index on gpu:1" in str(refuse(backend, lambda: operator.setitem(x, index, 2)))


def test_a_mask_on_another_device_is_refused(backend):
    x, mask = array(1), array(2) > 0
    assert "mask on gpu:1" in str(refuse(backend, lambda: x[mask]))
    assert "mask on gpu:1" in str(refuse(backend, lambda: operator.setitem(x, mask, 2)))


MOVE_ARRAYS = ("_copyto", "_npi_copyto", "_CrossDeviceCopy")


def test_every_operator_of_the_library_is_refused(backend):
    invoke = mx.nd._internal._imperative_invoke
    names = [name for name in mx.operator.get_all_registered_operators() if name not in MOVE_ARRAYS]
    passed = []
    with backend.strict():
        for name in names:
            handle = mx.base.OpHandle()
            mx.base.check_call(
                mx.base._LIB.NNGetOpHandle(name.encode(), mx.base.ctypes.byref(handle))
            )
            try:
                invoke(handle.value, [array(1), array(2)], [], [], None, True, False)
            except DeviceMismatchError:
                continue
            passed.append(name)
    assert len(names) > 1000
    assert passed == []


def test_the_message_names_the_operator_and_where_each_operand_is(backend):
    error = refuse(backend, lambda x, y: x - y, array(2), array(1))
    assert str(error) == (
        "cannot run subtract: Expected all tensors to be on the same device, but found "
        "x on gpu:1, y on gpu:0\n"
        "  devices: gpu:1, gpu:0\n"
        "  fix: y = backend.to(y, 'gpu:1')"
    )


def test_a_0_dim_array_of_the_host_is_an_operand_as_on_hardware(backend):
    assert refuse(backend, operator.add, array(1), array(0, ())).devices == ("gpu:0", "cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.copyto(mx.cpu(2)),
        lambda x: x.copyto(array(2)),
        lambda x: x.as_in_ctx(mx.cpu(2)),
        lambda x: x.as_nd_ndarray().as_in_context(mx.cpu(2)),
        lambda x: np.array(x, ctx=mx.cpu(2)),
        lambda x: np.full((2,), 3, ctx=mx.cpu(2)),
        lambda x: np.random.uniform(size=(2,), ctx=mx.cpu(2)),
    ],
)
def test_what_is_told_a_context_works(backend, make):
    with backend.strict():
        assert backend.device_of(make(array(1))) is gpu(1)


def test_contexts_that_are_one_device_mix(hardware):
    with hardware.strict():
        assert (array(0) + array(1)).asnumpy().sum() == 18


def test_what_mxnet_leaves_to_numpy_is_copied_to_the_host_as_in_metrics(backend):
    """As ``x.asnumpy()`` copies it."""
    with backend.strict():
        assert np.heaviside(array(1), array(2)).ctx == mx.cpu(1)
        mx.metric.Accuracy().update([array(2)], [array(1)])


# -- Gluon's blocks ---------------------------------------------------------------------------

LAYERS = {
    "deferred Dense": (lambda: nn.Dense(2), (2, 3)),
    "Conv2D": (lambda: nn.Conv2D(2, 3, in_channels=1), (1, 1, 5, 5)),
    "BatchNorm": (lambda: nn.BatchNorm(in_channels=3), (2, 3)),
    "Embedding": (lambda: nn.Embedding(4, 2), (2, 3)),
    "LSTM": (lambda: rnn.LSTM(2, input_size=3), (4, 2, 3)),
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


def test_a_layer_refuses_an_input_on_another_device(backend, layer):
    block, shape = layer
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        block(array(2, shape))
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


@pytest.mark.parametrize("settings", HYBRID, ids=str)
@pytest.mark.parametrize("is_recording", [False, True])
def test_a_hybridized_block_refuses_an_input_on_another_device(backend, settings, is_recording):
    net = sequential(nn.HybridSequential())
    net.initialize(ctx=mx.cpu(1))
    net.hybridize(**settings)
    net(array(1))
    x = array(2)
    recording = mx.autograd.record if is_recording else mx.autograd.pause
    with backend.strict(), recording(), pytest.raises(DeviceMismatchError) as caught:
        net(x)
    assert str(caught.value).startswith("cannot run HybridSequential: ")
    assert caught.value.fix == "x = backend.to(x, 'gpu:0')"
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
        [*map(block, [array(2)])]  # the line does not show the operands
    assert "cannot run Dense: " in str(caught.value)
    assert "output_weight on gpu:0, operand 1 on gpu:1" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_state_on_another_device_is_refused(backend):
    layer = rnn.LSTM(2, input_size=3)
    layer.initialize(ctx=mx.cpu(1))
    states = layer.begin_state(2, ctx=mx.cpu(2))
    with (
        backend.strict(),
        pytest.raises(DeviceMismatchError, match=r"run RNN: .* operand 3 on gpu:1"),
    ):
        layer(array(1, (4, 2, 3)), states)


def test_a_symbol_block_refuses_an_input_on_another_device(backend):
    x = mx.sym.var("x").as_np_ndarray()
    block = mx.gluon.SymbolBlock(x * mx.sym.var("w").as_np_ndarray(), [x])
    block.params["w"].shape = (3,)
    block.initialize(ctx=mx.cpu(1))
    with (
        backend.strict(),
        pytest.raises(DeviceMismatchError, match="w on gpu:0, operand 1 on gpu:1"),
    ):
        block(array(2))


def test_another_error_of_a_block_stays_itself(backend):
    with backend.strict(), pytest.raises(RuntimeError, match="has not been initialized") as caught:
        nn.Dense(2, in_units=3)(array(1))
    assert not isinstance(caught.value, DeviceMismatchError)


class OnTwoDevices(nn.HybridBlock):
    """Moves what goes from its first layer to its second, and fails."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(3, in_units=3), nn.Dense(3, in_units=3)
        self.first.initialize(ctx=mx.cpu(1))
        self.second.initialize(ctx=mx.cpu(2))

    def hybrid_forward(self, operators, x):
        self.second(self.first(x).copyto(mx.cpu(2)))
        return 1 / 0


def test_an_error_of_something_else_in_a_model_on_two_devices_stays_itself(backend):
    with backend.strict(), pytest.raises(ZeroDivisionError):
        OnTwoDevices()(array(1))


def test_parameters_are_set_from_anywhere(backend):
    block = nn.Dense(2, in_units=3)
    block.initialize(ctx=mx.cpu(1))
    with backend.strict():
        block.weight.set_data(array(2, (2, 3)))
        block.bias.initialize(mx.init.Constant(array(0, (2,))), force_reinit=True, ctx=mx.cpu(1))
        assert (block(array(1)).asnumpy() == 4).all()


# -- autograd -----------------------------------------------------------------------------


@pytest.fixture
def recorded():
    """A result on the first GPU, and what it was computed from."""
    x = array(1)
    x.attach_grad()
    with mx.autograd.record():
        y = x * x
    return x, y


def test_a_head_gradient_on_another_device_is_refused(backend, recorded):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        recorded[1].backward(array(2))
    assert "cannot run backward: " in str(caught.value)
    assert "operand 1 on gpu:0, operand 2 on gpu:1" in str(caught.value)


def test_grad_with_a_head_gradient_on_another_device_is_refused(backend, recorded):
    x, y = recorded
    with backend.strict(), pytest.raises(DeviceMismatchError, match="operand 2 on gpu:1"):
        mx.autograd.grad(y, [x], [array(2)])


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


# -- training -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nag", "adam", "rmsprop", "adagrad", "signum", "ftrl"])
def test_an_update_with_a_gradient_on_another_device_is_refused(backend, name):
    optimizer = mx.optimizer.create(name)
    weight = legacy(1)
    state = optimizer.create_state(0, weight)
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        optimizer.update(0, weight, legacy(2), state)
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


@pytest.mark.parametrize("store", ["local", "device", None])
def test_training_on_several_devices_works(store, backend):
    contexts = [mx.cpu(1), mx.cpu(2)]

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


# -- what is in place ---------------------------------------------------------------------------


@pytest.fixture
def in_place(backend):
    """What is where strictness replaces something, to be compared by identity."""
    places = [
        (owner, name) for owner, name, _ in framework_of(backend).strict.replacements(lambda: True)
    ]
    return lambda: [vars(owner)[name] for owner, name in places]


def same(before, after):
    return [a is b for a, b in zip(before, after, strict=True)]


def test_everything_is_replaced_in_a_block_and_the_very_functions_are_back_after_it(
    backend, in_place
):
    before = in_place()
    with backend.strict():
        assert not any(same(before, in_place()))
    assert all(same(before, in_place()))


def test_two_backends_are_strict_at_once(backend, in_place):
    before = in_place()
    other = d2ldev.Backend(type(framework_of(backend))(virtual_gpus=2))
    with backend.strict(), other.strict():
        refuse(backend, operator.add, array(1), array(2))
    assert all(same(before, in_place()))


def test_functions_that_were_imported_before_are_refused(backend):
    from mxnet.ndarray import concat
    from mxnet.numpy import add

    refuse(backend, concat, legacy(1), legacy(2))
    refuse(backend, add, array(1), array(2))


@pytest.mark.filterwarnings("ignore:Please import:DeprecationWarning")
def test_legacy_arrays_are_made_of_others(backend):
    with backend.strict():
        assert nd.array(legacy(1), ctx=mx.cpu(2)).ctx == mx.cpu(2)


def test_compiled_cython_modules_are_an_error(backend, monkeypatch, in_place):
    before = in_place()
    monkeypatch.setattr(nd._internal._imperative_invoke, "__module__", "mxnet._cy3.ndarray")
    with pytest.raises(UnsupportedValueError, match="MXNET_ENABLE_CYTHON=0"), backend.strict():
        pass
    assert all(same(before, in_place()))


THREADS = """
import d2ldev
backend = d2ldev.get_backend("mxnet")
import mxnet as mx

class Add(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        there = mx.nd.ones((2,), ctx=mx.cpu(2))
        self.assign(out_data[0], req[0], in_data[0] + in_data[1] + there)

@mx.operator.register("add_custom")
class Properties(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ["x", "y"]
    def create_operator(self, context, shapes, dtypes):
        return Add()

class Triple(mx.autograd.Function):
    def forward(self, x):
        return x * 3
    def backward(self, gradient):
        return gradient * mx.nd.full((2,), 3, ctx=mx.cpu(2))

x, y = (mx.nd.ones((2,), ctx=mx.cpu(i)) for i in (1, 2))
print(mx.nd.Custom(y, y, op_type="add_custom").asnumpy())
y.attach_grad()
with mx.autograd.record():
    z = Triple()(y)
z.backward()
print(y.grad.asnumpy())
try:
    mx.nd.Custom(x, y, op_type="add_custom")
except d2ldev.DeviceMismatchError:
    print("refused")
"""


def test_what_mxnet_runs_in_threads_of_its_own_computes_also_where_every_thread_is_strict():
    """Its arrays say ``cpu(0)`` wherever they are."""
    environment = os.environ | {"D2LDEV_STRICT": "1", "D2LDEV_VIRTUAL_GPUS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment
    )
    expected = "[3. 3.]\n[3. 3.]\nrefused\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
