"""MXNet's arrays, blocks and trainers in files."""

import mxnet as mx
import numpy as np
import pytest
from safetensors.numpy import save_file
from saved_files import bits

import d2ldev
from d2ldev import CheckpointError, UnsupportedValueError
from d2ldev.framework.testing import framework_of

nn, rnn = mx.gluon.nn, mx.gluon.rnn


def test_a_dtype_that_mxnet_lacks_is_refused_by_name(backend, path):
    import ml_dtypes

    backend.save({"x": np.ones(3, ml_dtypes.bfloat16)}, path)
    assert backend.load(path)["x"].dtype == ml_dtypes.bfloat16  # NumPy's stay NumPy's
    reference = d2ldev.get_backend("reference")
    reference.save({"x": reference.ones(3, dtype="complex64")}, path)
    with pytest.raises(CheckpointError, match="complex64"):
        backend.load(path)


@pytest.fixture
def made(set_np, backend):
    """Makes a model and a trainer: with statistics, and names that count on."""

    def make_anew(optimizer="adam", device="gpu:0", **options):
        net = nn.HybridSequential()
        net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4), nn.Dense(1, in_units=4))
        context = backend.native(device)
        net.initialize(mx.init.Zero(), ctx=context)
        for i, parameter in enumerate(net.collect_params().values()):
            if parameter.grad_req != "null" and "gamma" not in parameter.name:
                parameter.set_data(backend.rand(parameter.shape, seed=i, device=device))
        trainer = mx.gluon.Trainer(net.collect_params(), optimizer, options, kvstore=None)
        return {"net": net, "trainer": trainer}

    return make_anew


def train(backend, net, trainer, device, steps=3):
    x = backend.rand((8, 3), seed=9, device=device)
    for _ in range(steps):
        with mx.autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)


OPTIMIZERS = {
    "adam": {"learning_rate": 0.1},
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adagrad": {"learning_rate": 0.1},
}


def test_the_state_of_another_optimizer_is_refused_and_nothing_is_changed(backend, path, made):
    whole = made("adam")
    train(backend, **whole, device="gpu:0")
    backend.save(whole, path)
    other = made("sgd", momentum=0.9)
    before = {name: bits(backend, x) for name, x in backend.named_tensors(other["net"]).items()}
    with pytest.raises(CheckpointError, match="SGD"):
        backend.load_into(other, path)
    after = {name: bits(backend, x) for name, x in backend.named_tensors(other["net"]).items()}
    assert after == before


@pytest.mark.parametrize(
    ("spoilt", "problem"),
    [
        ({"states": {"0": 1}}, "1, an int"),
        ({"states": {"0": (np.zeros(3),)}}, "array"),
        ({"shapes": [[4, 3]]}, "its shapes"),
        ({"class": "SGD"}, "its class: Adam, SGD in the state"),
        ({"numbers": {}}, "its numbers: only one of the two has"),
        ({"schedule": {"step": 3}}, "its schedule: only one of the two has step"),
        ({"counts": {"0": b"1"}}, "the steps of parameter 0 are"),
        ({"counts": {"0": -1}}, "the steps of parameter 0 are -1"),
        ({"counts": {"0": 2**63}}, "the steps of parameter 0 are"),
    ],
    ids=str,
)
def test_an_invalid_state_is_refused_and_nothing_changes(backend, made, spoilt, problem):
    files, whole = framework_of(backend).files, made("adam")
    train(backend, **whole, device="gpu:0")
    state = files.state(whole["trainer"])
    before = flat(backend, state)
    with pytest.raises(ValueError, match=problem):
        files.prepare_state(whole["trainer"], {**state, **spoilt})
    assert flat(backend, files.state(whole["trainer"])) == before


def flat(backend, state):
    arrays = {name: [bits(backend, x) for x in pair] for name, pair in state["states"].items()}
    return {**state, "states": arrays}


@pytest.mark.parametrize("value", ["fast", None, [1.0], {}], ids=str)
def test_a_number_of_another_kind_is_refused(backend, made, value):
    trainer, files = made("adam")["trainer"], framework_of(backend).files
    state = files.state(trainer)
    state["numbers"]["lr"] = value
    with pytest.raises(ValueError, match="its numbers: lr is"):
        files.prepare_state(trainer, state)


def test_a_number_is_not_a_flag(backend, made):
    trainer, files = made("adam")["trainer"], framework_of(backend).files
    state = files.state(trainer)
    state["numbers"]["lazy_update"] = 5
    with pytest.raises(ValueError, match="its numbers: lazy_update is 5"):
        files.prepare_state(trainer, state)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_arrays_of_a_state_have_the_shapes_of_its_parameters(backend, made, optimizer):
    whole = made(optimizer, **OPTIMIZERS[optimizer])
    train(backend, **whole, device="gpu:0")
    files, trainer = framework_of(backend).files, whole["trainer"]
    state = files.state(trainer)
    here, there = (str(state["shapes"].index(shape)) for shape in ([4, 3], [1, 4]))
    state["states"][here] = state["states"][there]
    message = rf"the state of parameter {here} does not fit: it is .*\(1, 4\)"
    with pytest.raises(ValueError, match=message):
        files.prepare_state(trainer, state)


def test_nothing_is_changed_before_what_was_checked_is_called(backend, path, made):
    whole, files = made("adam"), framework_of(backend).files
    train(backend, **whole, device="gpu:0")
    trainer = whole["trainer"]
    backend.save(files.state(trainer), path)
    old = flat(backend, files.state(trainer))
    train(backend, **whole, device="gpu:0")
    new = flat(backend, files.state(trainer))
    put = files.prepare_state(trainer, backend.load(path))
    assert flat(backend, files.state(trainer)) == new != old
    put()
    assert flat(backend, files.state(trainer)) == old


def test_a_trainer_without_shapes_takes_no_state_that_has_them(backend, path, made):
    whole = made("adam")
    train(backend, **whole, device="gpu:0")
    backend.save(whole["trainer"], path)
    net = nn.HybridSequential()
    net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(1))
    net.initialize()
    with pytest.raises(CheckpointError, match="its shapes"):
        backend.load_into(mx.gluon.Trainer(net.collect_params(), "adam"), path)


def test_an_array_with_a_gradient_stays_who_it_is_and_is_trained_on(backend, path):
    x = backend.ones(3)
    x.attach_grad()
    backend.save([backend.zeros(3) + 2], path)
    assert backend.load_into([x], path)[0] is x
    with mx.autograd.record():
        y = (x * x).sum()
    y.backward()
    assert backend.to_numpy(x).tolist() == [2, 2, 2]
    assert backend.to_numpy(x.grad).tolist() == [4, 4, 4]


def test_a_hybridized_block_computes_with_loaded_parameters(backend, path):
    x = backend.ones((1, 2))
    net, other = backend.mlp([2, 3, 1], seed=1), backend.mlp([2, 3, 1], seed=2)
    other.hybridize(static_alloc=True)
    other(x)
    backend.save(net, path)
    backend.load_into(other, path)
    assert backend.to_numpy(other(x)) == backend.to_numpy(net(x))


@pytest.fixture
def deferred(set_np, backend):
    """Makes a model whose shapes come with its first batch."""

    def make_anew(device="cpu", *, is_initialized=True, n_out=1):
        net = nn.HybridSequential()
        net.add(nn.Dense(4, activation="tanh"), nn.BatchNorm(), nn.Dense(n_out))
        if is_initialized:
            net.initialize(ctx=backend.native(device))
        return net

    return make_anew


@pytest.mark.parametrize(
    ("device", "is_initialized"), [("cpu", True), ("gpu:1", True), ("cpu", False)]
)
def test_a_model_without_shapes_gets_those_of_the_file(
    backend, path, deferred, device, is_initialized
):
    net, x = deferred(), backend.rand((5, 3), seed=1)
    net(x)
    backend.save(net, path)
    other = backend.load_into(deferred(device, is_initialized=is_initialized), path)
    assert set(map(str, backend.placement(other).values())) == {device}
    assert bits(backend, other(backend.to(x, device))) == bits(backend, net(x))


@pytest.mark.parametrize("n_out", [1, 2])
def test_a_model_without_shapes_has_none_still_when_the_file_was_refused(
    backend, path, deferred, n_out
):
    net = deferred(n_out=n_out)
    net(backend.rand((5, 3), seed=1))
    saved = dict(backend.named_tensors(net))
    if n_out == 1:
        del saved["1.gamma.data"]
    save_file({name: backend.to_numpy(x) for name, x in saved.items() if "grad" not in name}, path)
    other = deferred()
    shapes = [p.shape for p in other.collect_params().values()]
    with pytest.raises(
        CheckpointError, match=r"it lacks 1\.gamma|2\.weight\.data is float32 \(1, 4\)"
    ):
        backend.load_into(other, path)
    assert [p.shape for p in other.collect_params().values()] == shapes
    assert other(backend.rand((5, 7), seed=1)).shape == (5, 1)


def without_arrays(*layers):
    net = nn.Sequential()
    net.add(*layers)
    return net


OLD, NUMPY = (mx.nd.ones, mx.nd.NDArray), (mx.np.ones, mx.np.ndarray)


@pytest.mark.parametrize(("ones", "kind"), [OLD, NUMPY], ids=["old", "NumPy's"])
@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_model_without_shapes_gets_arrays_of_the_kind_that_its_first_batch_would_make(
    backend, path, request, ones, kind, is_initialized
):
    if kind is mx.np.ndarray:
        request.getfixturevalue("set_np")
    net, other = (without_arrays(nn.Dense(4), nn.Dense(1)) for _ in range(2))
    net.initialize()
    net(ones((2, 3)))
    backend.save(net, path)
    if is_initialized:
        other.initialize()
    backend.load_into(other, path)
    parameters = other.collect_params().values()
    assert {type(x) for p in parameters for x in (p.data(), p.grad())} == {kind}
    assert bits(backend, other(ones((2, 3)))) == bits(backend, net(ones((2, 3))))


@pytest.mark.filterwarnings("ignore:ndarray.context:DeprecationWarning")  # Gluon's own use
@pytest.mark.parametrize("layer", [rnn.RNN, rnn.LSTM, rnn.GRU])
def test_a_recurrent_layer_without_shapes_gets_those_of_the_file(set_np, backend, path, layer):
    x = backend.rand((5, 2, 3), seed=1)
    net, other = (without_arrays(layer(4, 2, bidirectional=True)) for _ in range(2))
    net.initialize()
    net(x)
    backend.save(net, path)
    other.initialize()
    backend.load_into(other, path)
    assert bits(backend, other(x)) == bits(backend, net(x))


def sequence(*parts):
    net = nn.Sequential()
    net.add(*parts)
    net.initialize()
    return net


NOT_STANDARD = {
    "batch normalization": lambda: sequence(nn.BatchNorm(in_channels=3)),
    "a function": lambda: sequence(nn.Dense(3, in_units=3), nn.Lambda(lambda x: x[:, ::-1])),
    "a layer twice": lambda: sequence(*[nn.Dense(3, in_units=3)] * 2),
    "no sequence": lambda: nn.Dense(3, in_units=3),
}


@pytest.mark.parametrize("make", NOT_STANDARD.values(), ids=NOT_STANDARD.keys())
def test_no_layouts_are_claimed_for_other_models(backend, path, make):
    net = make()
    net.initialize()
    backend.save(net, path)
    assert b"layouts" not in path.read_bytes()


def test_a_trainer_is_known_by_the_order_in_which_its_parameters_were_made(backend, path, made):
    with mx.name.NameManager():
        first = made("adagrad")
    # MXNet's counting goes from one digit to two between the layers of this one.
    with mx.name.NameManager() as names:
        names._counter["dense"] = 9
        second = made("adagrad")
    shapes = [[p.shape for p in each["trainer"]._params] for each in (first, second)]
    assert shapes[0] != shapes[1]
    train(backend, **first, device="gpu:0")
    backend.save(first, path)
    backend.load_into(second, path)
    for each in (first, second):
        train(backend, **each, device="gpu:0")
    assert [bits(backend, x) for x in backend.named_tensors(first["net"]).values()] == [
        bits(backend, x) for x in backend.named_tensors(second["net"]).values()
    ]


def test_what_a_file_lacks_is_listed_in_the_model_s_order_after_what_has_no_shape_yet(
    set_np, backend, path
):
    net = nn.Sequential()
    net.add(nn.Dense(3, in_units=2), nn.Dense(1))
    net.initialize()
    save_file({"0.weight.data": np.ones((3, 2), "float32")}, path)
    loaded = backend.load_into(net, path, strict=False)
    assert loaded.missing == ["1.weight.data", "0.bias.data", "1.bias.data"]


@pytest.mark.parametrize("kind", ["csr", "row_sparse"])
def test_a_sparse_array_is_refused(backend, tmp_path, kind):
    x = mx.nd.ones((2, 3)).tostype(kind)
    with pytest.raises(UnsupportedValueError, match="at x cannot be saved: it is sparse"):
        backend.save({"x": x}, tmp_path / "sparse.safetensors")
