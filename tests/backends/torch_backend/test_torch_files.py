"""torch's tensors, models and optimizers in files: training goes on to the same last bit."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch.nn.parameter import is_lazy

import d2ldev
from d2ldev import CheckpointError, UnsupportedValueError
from d2ldev.framework.testing import framework_of

# -- tensors and models ----------------------------------------------------------------------------


def bits(x):
    """Return the bytes of a tensor, which are the same for NaNs, too."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, 1:],
        lambda x: x[0].expand(4, 4),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: (x * 1j).conj().imag,  # negated when it is read
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "negated"],
)
def test_a_tensor_that_is_not_contiguous_is_saved_in_the_order_of_its_indices(
    torch_backend, path, view
):
    x = view(torch.arange(16, dtype=torch.float32).reshape(4, 4))
    torch_backend.save(x, path)
    loaded = torch_backend.load(path)
    assert loaded.is_contiguous()
    torch.testing.assert_close(loaded, x, rtol=0, atol=0)


def test_a_tensor_of_the_cpu_is_written_from_its_own_memory(torch_backend):
    x = torch.zeros(4)
    assert framework_of(torch_backend).files.borrow(x).ctypes.data == x.data_ptr()


def test_a_tensor_of_the_cpu_is_loaded_without_another_copy(torch_backend):
    data = np.arange(4.0)
    assert framework_of(torch_backend).files.adopt(
        data, "float64", torch.device("cpu")
    ).data_ptr() == (data.ctypes.data)


def test_loaded_arrays_can_be_written_to_and_trained(torch_backend, path):
    torch_backend.save(torch.ones(3), path)
    x = torch_backend.load(path).requires_grad_()
    (x * x).sum().backward()
    with torch.no_grad():
        x -= x.grad
    assert x.tolist() == [-1, -1, -1]


def test_the_parts_of_a_long_name_are_not_all_looked_for_among_the_names_of_a_shared_module(
    torch_backend, path
):
    layer = torch.nn.Linear(2, 2)
    torch_backend.save({"a." * 1_000_000: torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"it lacks 0\.weight, 0\.bias"):
        torch_backend.load_into(torch.nn.Sequential(layer, layer), path)


# -- models of other programs' files ---------------------------------------------------------------


def same(net, other):
    """Return whether two modules have the same parameters and buffers, bit for bit."""
    pairs = zip(net.state_dict().items(), other.state_dict().items(), strict=True)
    return all((n, bits(x)) == (m, bits(y)) for (n, x), (m, y) in pairs)


@pytest.mark.parametrize("cls", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_reads_what_safetensors_has_written_of_one(torch_backend, path, cls):
    net, other = (cls(3, 4, num_layers=2, bidirectional=True) for _ in range(2))
    save_model(net, path)
    torch_backend.load_into(other, path)
    assert same(net, other)
    x = torch.rand(2, 5, 3)
    torch.testing.assert_close(other(x)[0], net(x)[0], rtol=0, atol=0)


class Tied(torch.nn.Module):
    """An embedding whose weight is that of the last layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.last = torch.nn.Linear(3, 5, bias=False)
        self.last.weight = self.embedding.weight


@pytest.mark.parametrize("name", ["embedding.weight", "last.weight"])
def test_a_tied_weight_is_read_under_whichever_of_its_names_it_is_stored(torch_backend, path, name):
    save_file({name: torch.ones(5, 3)}, path)
    net = torch_backend.load_into(Tied(), path)
    assert net.last.weight is net.embedding.weight
    assert net.last.weight.tolist() == torch.ones(5, 3).tolist()


class Twice(torch.nn.Module):
    """A module that has one layer under two names, and its statistics."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.second = self.first


@pytest.mark.parametrize("make", [Tied, Twice])
def test_a_state_dict_with_several_names_of_one_tensor_is_read(torch_backend, path, make):
    net, other, third = make(), make(), make()
    torch_backend.load_into(other, net.state_dict())
    save_file({name: x.clone() for name, x in net.state_dict().items()}, path)
    torch_backend.load_into(third, path)
    assert same(net, other)
    assert same(net, third)


def test_a_buffer_of_one_module_that_is_two_in_a_state_dict_is_refused(torch_backend):
    net = Twice()
    state = {**net.state_dict(), "second.1.running_mean": torch.ones(2)}
    with pytest.raises(
        CheckpointError, match=r"first\.1\.running_mean and second\.1\.running_mean"
    ):
        torch_backend.load_into(net, state)
    assert net.first[1].running_mean.tolist() == [0, 0]


def test_a_tied_weight_that_is_two_in_the_file_is_refused(torch_backend, path):
    save_file({"embedding.weight": torch.ones(5, 3), "last.weight": torch.zeros(5, 3)}, path)
    with pytest.raises(CheckpointError, match=r"embedding\.weight and last\.weight are one tensor"):
        torch_backend.load_into(Tied(), path)


def test_what_torch_saves_in_no_state_dict_may_be_missing(torch_backend, path):
    net, other = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    for each in (net, other):
        each[0].register_buffer("positions", torch.arange(3), persistent=False)
        each[0].scale = torch.ones(2)
    save_model(net, path)
    torch_backend.load_into(other, path)
    assert same(net, other)
    assert other[0].positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize("missing", ["0.weight", "1.running_mean"])
def test_a_parameter_or_a_buffer_that_torch_saves_may_not_be_missing(torch_backend, path, missing):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    save_file({name: x for name, x in net.state_dict().items() if name != missing}, path)
    with pytest.raises(CheckpointError, match=f"it lacks {missing}"):
        torch_backend.load_into(net, path)


class Recalling(torch.nn.Module):
    """A module whose last input is in a buffer, None at first."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.register_buffer("last", None)


def recall(dtype):
    net = Recalling()
    net.last = torch.arange(3).to(dtype)
    return torch.nn.Sequential(net, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_buffer_that_is_none_is_read_to_the_device_of_its_module(virtual, path, dtype):
    net = recall(dtype)
    virtual.save(net, path)
    for source in (path, net.state_dict()):
        other = torch.nn.Sequential(Recalling(), torch.nn.Linear(1, 1))
        virtual.load_into(virtual.place(other, "gpu:1"), source)
        assert virtual.device_of(other[0].last) == virtual.gpu(1)
        assert (other[0].last.dtype, other[0].last.tolist()) == (dtype, [0, 1, 2])


def test_a_buffer_that_is_none_stays_none_when_the_file_was_refused(torch_backend, path):
    save_file({"0.last": torch.ones(3)}, path)
    net = torch.nn.Sequential(Recalling())
    with pytest.raises(CheckpointError, match=r"it lacks 0\.linear"):
        torch_backend.load_into(net, path)
    assert net[0].last is None


@pytest.mark.parametrize(
    ("wanted", "missing", "name"),
    [
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), "bias"),
        (
            torch.nn.BatchNorm1d(2),
            torch.nn.BatchNorm1d(2, track_running_stats=False),
            "running_mean",
        ),
    ],
)
def test_a_parameter_that_a_layer_lacks_is_not_read_into_it(
    torch_backend, path, wanted, missing, name
):
    torch_backend.save(wanted, path)
    with pytest.raises(CheckpointError, match=f"unexpected.* {name}"):
        torch_backend.load_into(missing, path)


def lazy():
    return torch.nn.Sequential(
        torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(1)
    )


def test_a_lazy_module_gets_its_shapes_from_the_file(torch_backend, path):
    net, x = lazy(), torch.rand(5, 3)
    net(x)
    torch_backend.save(net, path)
    other = torch_backend.load_into(lazy(), path)
    assert same(net, other)
    torch.testing.assert_close(other.eval()(x), net.eval()(x), rtol=0, atol=0)


IMAGES = torch.rand(2, 4, 6, 6)
LAZY = {
    "convolution": lambda: torch.nn.LazyConv2d(6, 3, groups=2),
    "transposed": lambda: torch.nn.LazyConvTranspose2d(3, 2),
    "transposed, groups": lambda: torch.nn.LazyConvTranspose2d(6, 2, groups=2),
    "batch norm": lambda: torch.nn.LazyBatchNorm2d(),
    "batch norm, statistics only": lambda: torch.nn.LazyBatchNorm2d(affine=False),
    "instance norm": lambda: torch.nn.LazyInstanceNorm2d(affine=True),
    "instance norm, weights only": lambda: torch.nn.LazyInstanceNorm2d(
        affine=True, track_running_stats=False
    ),
}


@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY.keys())
def test_every_lazy_layer_computes_with_the_values_of_the_file(torch_backend, path, make):
    layer = make()
    layer(IMAGES)
    torch_backend.save(layer, path)
    other = torch_backend.load_into(make(), path).eval()
    assert torch.equal(other(IMAGES), layer.eval()(IMAGES))
    assert str(other) == str(layer)


@pytest.mark.parametrize("shape", [(4,), (), (3, 1)])
def test_a_lazy_norm_whose_sizes_differ_is_refused_and_lazy_still(torch_backend, shape):
    stored = {"weight": torch.ones(3), "bias": torch.ones(3), "running_mean": torch.ones(3)}
    stored |= {"running_var": torch.ones(shape), "num_batches_tracked": torch.tensor(0)}
    layer = torch.nn.LazyBatchNorm1d()
    with pytest.raises(CheckpointError, match="weight has no shape yet"):
        torch_backend.load_into(layer, stored)
    assert (layer.num_features, is_lazy(layer.weight)) == (0, True)


def test_a_lazy_module_on_a_virtual_gpu_gets_its_shapes_there(virtual, path):
    net = lazy()
    net(torch.rand(5, 3))
    virtual.save(net, path)
    other = virtual.load_into(virtual.place(lazy(), "gpu:1"), path)
    assert set(map(str, virtual.placement(other).values())) == {"gpu:1"}
    assert same(net, other)


def test_a_lazy_module_is_lazy_still_when_the_file_was_refused(torch_backend, path):
    save_file({"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4)}, path)
    net = lazy()
    before = [type(x) for x in (*net.parameters(), *net.buffers())]
    with pytest.raises(CheckpointError, match="it lacks"):
        torch_backend.load_into(net, path)
    assert [type(x) for x in (*net.parameters(), *net.buffers())] == before
    assert net(torch.rand(5, 2)).shape == (5, 1)


LAZY_IN_PART = {
    "a weight without its bias": (torch.nn.LazyLinear, {"0.weight": torch.ones(4, 3)}),
    "statistics without their weight": (
        lambda _: torch.nn.LazyBatchNorm1d(),
        {"0.running_mean": torch.ones(3), "0.running_var": torch.ones(3)},
    ),
}


@pytest.mark.parametrize(("make", "stored"), LAZY_IN_PART.values(), ids=LAZY_IN_PART.keys())
def test_a_lazy_module_of_which_a_part_is_there_is_left_as_it_is(torch_backend, make, stored):
    net = torch.nn.Sequential(make(4), torch.nn.Linear(3, 1, bias=False))
    result = torch_backend.load_into(net, {**stored, "1.weight": torch.ones(1, 3)}, strict=False)
    assert result.matched == ["1.weight"]
    assert set(stored) <= set(result.missing)
    assert result.unexpected == list(stored)
    assert net[1].weight.tolist() == [[1, 1, 1]]
    assert net[0](torch.rand(5, 3)).shape[0] == 5


@pytest.mark.parametrize(
    ("made", "saved"),
    [
        (lambda: torch.nn.LazyLinear(9), torch.nn.Linear(3, 2)),
        (lambda: torch.nn.LazyConv2d(4, 3), torch.nn.Conv2d(1, 2, 3)),
        (lambda: torch.nn.LazyConv2d(2, 5), torch.nn.Conv2d(1, 2, 3)),
        (lambda: torch.nn.LazyLinear(9, bias=False), torch.nn.Linear(3, 2, bias=False)),
        (lambda: torch.nn.LazyConvTranspose2d(4, 3), torch.nn.ConvTranspose2d(1, 2, 3)),
        (
            lambda: torch.nn.LazyConvTranspose1d(2, 5, bias=False),
            torch.nn.ConvTranspose1d(1, 2, 3, bias=False),
        ),
        (
            lambda: torch.nn.LazyConvTranspose1d(4, 3, bias=False),
            torch.nn.ConvTranspose1d(1, 2, 3, bias=False),
        ),
    ],
    ids=[
        *("features", "channels", "kernel", "no bias"),
        *("transposed channels", "transposed kernel", "transposed, no bias"),
    ],
)
def test_a_lazy_module_that_was_made_with_other_sizes_is_refused_and_lazy_still(
    torch_backend, path, made, saved
):
    net = torch.nn.Sequential(made())
    torch_backend.save(torch.nn.Sequential(saved), path)
    with pytest.raises(CheckpointError, match=r"0\.weight has no shape yet"):
        torch_backend.load_into(net, path)
    assert is_lazy(net[0].weight)


def test_the_error_of_a_partly_lazy_module_names_what_it_lacks(torch_backend):
    net = torch.nn.Sequential(torch.nn.LazyLinear(4))
    with pytest.raises(
        CheckpointError, match=r"it lacks 0\.bias; these do not fit: 0\.weight has no shape"
    ):
        torch_backend.load_into(net, {"0.weight": torch.ones(4, 3)})
    assert net(torch.rand(5, 2)).shape == (5, 4)


# -- layers ----------------------------------------------------------------------------------------


OTHERS = {
    "a subclass": lambda: type("Net", (torch.nn.Sequential,), {})(torch.nn.Linear(3, 3)),
    "a layer of one's own": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 3), type("Flip", (torch.nn.Module,), {})()
    ),
    "a parametrized layer": lambda: torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    ),
    "no sequence": lambda: torch.nn.Linear(3, 3),
    "shuffled channels": lambda: _between_convolutions(torch.nn.ChannelShuffle(2)),
    "shuffled pixels": lambda: _between_convolutions(torch.nn.PixelUnshuffle(1)),
    "a split axis": lambda: _between_convolutions(torch.nn.Unflatten(1, (2, 2))),
    "folded": lambda: _between_convolutions(torch.nn.Fold((2, 2), 1)),
}


def _between_convolutions(layer):
    return torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), layer, torch.nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_no_layers_are_claimed_for_other_models(torch_backend, make):
    assert framework_of(torch_backend).files.layers(make()) is None


def test_the_layers_of_a_convolutional_network_are_those_with_kernels(torch_backend):
    convolution, dense = torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(8, 2, bias=False)
    net = torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.Flatten(), dense)
    found = framework_of(torch_backend).files.layers(net)
    kernels = [(convolution.weight, convolution.bias), (dense.weight, None)]
    assert [(layer.weight, layer.bias) for layer in found] == kernels


# -- optimizers ------------------------------------------------------------------------------------


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1),
}


def build(backend, make_optimizer, seed, device="cpu"):
    net = backend.mlp([3, 4, 1], activation="tanh", seed=seed, device=device)
    return {"net": net, "optimizer": make_optimizer(net.parameters())}


def train(backend, net, optimizer, steps=3):
    x = backend.rand((8, 3), seed=9, device=backend.device_of(net[0].weight))

    def closure():
        optimizer.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def values(net):
    return [x.cpu().numpy().tobytes() for x in net.state_dict().values()]


def test_settings_are_those_of_the_file(torch_backend, path):
    whole = build(torch_backend, OPTIMIZERS["Adam"], 1)
    whole["optimizer"].param_groups[0]["lr"] = 0.025
    torch_backend.save(whole, path)
    resumed = torch_backend.load_into(build(torch_backend, OPTIMIZERS["Adam"], 2), path)
    assert resumed["optimizer"].param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("scheduled", [0, 1])
def test_a_scheduler_s_settings_may_be_in_one_of_the_two_only(torch_backend, path, scheduled):
    pair = [build(torch_backend, OPTIMIZERS["SGD"], seed)["optimizer"] for seed in (1, 2)]
    torch.optim.lr_scheduler.StepLR(pair[scheduled], 1)
    pair[0].param_groups[0]["lr"] = 0.025
    torch_backend.save(pair[0], path)
    torch_backend.load_into(pair[1], path)
    group = pair[1].param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.025, 0.1)


class Nested(torch.optim.Optimizer):
    """Keeps tensors in a dict and in a list."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state.setdefault("sides", {"left": torch.zeros_like(weight)})["left"] += 1
            state.setdefault("past", [torch.zeros_like(weight)])[0] += 1


def test_what_is_nested_in_the_state_of_an_optimizer_is_loaded_to_its_parameter(virtual, path):
    def build():
        return Nested([torch.nn.Parameter(virtual.ones(3, device="gpu:0"))])

    saved, loaded = build(), build()
    saved.step()
    virtual.save(saved, path)
    virtual.load_into(loaded, path)
    loaded.step()
    (state,) = loaded.state.values()
    assert state["sides"]["left"].device == state["past"][0].device == virtual.native("gpu:0")
    assert state["sides"]["left"].tolist() == state["past"][0].tolist() == [2, 2, 2]


def test_the_state_of_narrow_parameters_keeps_its_own_dtype(torch_backend):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((3,), 1 / 3)
    files = framework_of(torch_backend).files
    files.prepare_state(optimizer, files.state(optimizer))()
    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32


def with_own(told, **changes):
    """Return the state of an optimizer with other values in its ``state_dict``."""
    return {**told, "state_dict": {**told["state_dict"], **changes}}


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda state: {**state, "class": "SGD"}, "its class"),
        (lambda state: {**state, "shapes": [[[1]]]}, "its shapes"),
        (lambda state: with_own(state, param_groups=[{"params": [0]}]), "other parameters"),
        (lambda state: with_own(state, param_groups=None), "other parameters"),
        (lambda state: with_own(state, state={9: {}}), "not a state of its parameters"),
        (lambda state: with_own(state, state=[1]), "not a state of its parameters"),
        (lambda state: {**state, "state_dict": 3}, "not the state of a torch optimizer"),
        (lambda state: {}, "not the state of a torch optimizer"),
        (lambda state: 3, "not the state of a torch optimizer"),
    ],
)
def test_an_invalid_state_of_the_optimizer_is_refused(torch_backend, spoil, problem):
    optimizer = build(torch_backend, OPTIMIZERS["Adam"], 1)["optimizer"]
    with pytest.raises(ValueError, match=problem):
        framework_of(torch_backend).files.prepare_state(
            optimizer, spoil(framework_of(torch_backend).files.state(optimizer))
        )


def test_the_number_of_steps_stays_on_the_host(virtual, path):
    """Where torch's optimizers read it in every step; on a GPU they would wait for it."""
    whole = build(virtual, OPTIMIZERS["Adam"], 1, "gpu:0")
    train(virtual, **whole)
    virtual.save(whole, path)
    train(virtual, **whole)
    resumed = virtual.load_into(build(virtual, OPTIMIZERS["Adam"], 2, "gpu:1"), path)
    assert set(map(str, virtual.placement(resumed).values())) == {"gpu:1"}
    states = resumed["optimizer"].state.values()
    assert {state["step"].device.type for state in states} == {"cpu"}
    train(virtual, **resumed)
    assert values(resumed["net"]) == values(whole["net"])


def _step(kind, **settings):
    """Return an optimizer that has taken a step, with a kernel and a bias."""
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]
    for x in parameters:
        x.grad = torch.ones_like(x)
    optimizer = kind(parameters, **settings)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_avg", None),
        ("exp_avg", 1.0),
        ("exp_avg", torch.ones(3)),  # it would be broadcast
        ("exp_avg", torch.ones(2, 3, dtype=torch.complex64)),
        ("exp_avg_sq", torch.ones(2, 3, dtype=torch.int64)),
        ("step", torch.ones(2)),
        ("step", torch.tensor(-3.0)),
        ("step", torch.tensor(float("nan"))),
    ],
    ids=str,
)
def test_a_state_that_would_fail_in_the_next_step_is_refused(torch_backend, key, value):
    optimizer, files = _step(torch.optim.Adam), framework_of(torch_backend).files
    state = files.state(optimizer)
    kept = state["state_dict"]["state"]
    spoilt = with_own(state, state={**kept, 0: {**kept[0], key: value}})
    with pytest.raises(ValueError, match=f"its {key}"):
        files.prepare_state(optimizer, spoilt)


@pytest.mark.parametrize("settings", [{"betas": 5}, {"betas": [0.9]}, {"lr": "a"}], ids=str)
def test_settings_that_would_fail_in_the_next_step_are_refused(torch_backend, settings):
    optimizer, files = _step(torch.optim.Adam), framework_of(torch_backend).files
    state = files.state(optimizer)
    groups = [{**state["state_dict"]["param_groups"][0], **settings}]
    spoilt = with_own(state, param_groups=groups)
    with pytest.raises(ValueError, match="its settings"):
        files.prepare_state(optimizer, spoilt)


def test_a_state_without_what_is_kept_from_the_beginning_is_refused(torch_backend):
    optimizer, files = _step(torch.optim.Adagrad), framework_of(torch_backend).files
    with pytest.raises(ValueError, match="its step"):
        files.prepare_state(optimizer, with_own(files.state(optimizer), state={}))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
        *((name, {}) for name in ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam")),
        *((name, {}) for name in ("Rprop", "Adafactor")),
    ],
)
def test_a_state_of_any_optimizer_of_torch_is_taken(torch_backend, name, settings):
    optimizer = _step(getattr(torch.optim, name), **settings)
    files = framework_of(torch_backend).files
    before = files.state(optimizer)
    files.prepare_state(optimizer, before)()
    after = files.state(optimizer)
    torch.testing.assert_close(after["state_dict"]["state"], before["state_dict"]["state"])


def _pack(*lengths):
    sequences = [torch.full((n,), float(n)) for n in lengths]
    return torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)


def test_a_packed_sequence_is_saved_with_its_batch_sizes(torch_backend, path):
    packed = _pack(3, 4, 1)
    torch_backend.save({"x": packed}, path)
    parts = torch_backend.load(path)["x"]
    assert [part.tolist() for part in parts] == [part.tolist() for part in packed]
    with pytest.raises(CheckpointError, match="batch_sizes"):
        torch_backend.load_into({"x": _pack(2, 5, 1)}, path)


class Keeping(torch.nn.Module):
    """A module that keeps something in an attribute."""

    def __init__(self, kept):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.kept = kept


@pytest.mark.parametrize(("lengths", "is_read"), [((3, 3), False), ((2, 4), True)])
def test_a_packed_sequence_in_a_model_is_read_with_its_batch_sizes_or_not_at_all(
    torch_backend, path, lengths, is_read
):
    saved, before = _pack(4, 2), _pack(*lengths)
    net = Keeping({"x": [before]})
    torch_backend.save({"net": Keeping({"x": [saved]})}, path)
    torch_backend.load_into(net, path, only="net")
    expected = saved if is_read else before
    assert all(map(torch.equal, net.kept["x"][0], expected))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_tensor_is_refused_and_a_dense_copy_is_not(torch_backend, path, make):
    x = make(torch.eye(2))
    with pytest.raises(UnsupportedValueError, match=r"the Tensor at x .* it is sparse"):
        torch_backend.save({"x": x}, path)
    torch_backend.save({"x": x.to_dense()}, path)
    assert torch.equal(torch_backend.load(path)["x"], torch.eye(2))


def test_a_sparse_tensor_in_an_attribute_of_a_model_is_named(torch_backend, path):
    def model():
        net = torch.nn.Linear(2, 2)
        net.adjacency = torch.eye(2).to_sparse()
        return net

    net = model()
    with pytest.warns(d2ldev.D2LDevWarning, match="has no adjacency. fix: save it beside the file"):
        torch_backend.save(net, path)
    assert sorted(torch_backend.load(path)) == ["bias", "weight"]
    other = torch_backend.load_into(model(), path)
    assert torch.equal(other.weight, net.weight)


# -- memory ----------------------------------------------------------------------------------------


def _over_bytes():
    data = bytes(16)
    return torch.frombuffer(data, dtype=torch.float32).view(2, 2), lambda: data == bytes(16)


def _over_a_read_only_map(path):
    np.save(path, np.zeros((2, 2), "float32"))
    return torch.from_numpy(np.load(path, mmap_mode="r")), lambda: not np.load(path).any()


def _over_one_row():
    row = torch.zeros(1, 2)
    return row.expand(2, 2), lambda: not row.any()


def _over_an_inference_tensor():
    with torch.inference_mode():
        return torch.zeros(2, 2), lambda: True


@pytest.mark.filterwarnings("ignore:The given")  # torch's own, of memory that is not writable
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize(
    "make", [_over_bytes, _over_a_read_only_map, _over_one_row, _over_an_inference_tensor]
)
def test_memory_that_cannot_be_written_is_replaced(torch_backend, tmp_path, make, kind):
    x, is_unchanged = make(tmp_path / "x.npy") if make is _over_a_read_only_map else make()
    module = torch.nn.Module()
    if kind == "buffer":
        module.register_buffer("x", x)
    else:
        module.x = torch.nn.Parameter(torch.zeros(2, 2))
        module.x.data = x
    values = np.arange(4, dtype="float32").reshape(2, 2)
    torch_backend.load_into(module, {"x": values})
    assert module.x.tolist() == values.tolist()
    assert is_unchanged()


def test_a_model_in_shared_memory_stays_there(torch_backend):
    net, other = (torch_backend.mlp([3, 2], seed=seed) for seed in (0, 1))
    net.share_memory()
    addresses = [x.data_ptr() for x in net.parameters()]
    torch_backend.load_into(net, torch_backend.named_tensors(other))
    assert same(net, other)
    assert [x.data_ptr() for x in net.parameters()] == addresses
    assert all(x.is_shared() for x in net.parameters())


class Joined(torch.nn.Module):
    """A module whose weights are views of a buffer, interleaved."""

    def __init__(self, values):
        super().__init__()
        self.register_buffer("joined", torch.tensor(values))
        self.even, self.odd = (torch.nn.Parameter(self.joined[begin::2]) for begin in (0, 1))


def test_tensors_of_one_memory_with_values_that_agree_stay_in_it(torch_backend):
    module = Joined([0.0] * 4)
    values = torch_backend.named_tensors(Joined([1.0, 2.0, 3.0, 4.0]))
    address = module.joined.data_ptr()
    torch_backend.load_into(module, values)
    assert module.joined.tolist() == [1, 2, 3, 4]
    assert (module.even.tolist(), module.odd.tolist()) == ([1, 3], [2, 4])
    assert module.joined.data_ptr() == module.even.data_ptr() == address


def test_tensors_of_one_memory_with_other_values_are_separated(torch_backend):
    module = Joined([0.0] * 4)
    even = module.even
    values = {"joined": torch.ones(4), "even": torch.full((2,), 2.0), "odd": torch.full((2,), 3.0)}
    torch_backend.load_into(module, values)
    assert module.even is even
    assert module.joined.tolist() == [1] * 4
    assert (module.even.tolist(), module.odd.tolist()) == ([2] * 2, [3] * 2)


def test_what_a_call_left_in_an_attribute_is_not_written_into(torch_backend, path):
    """The batch is the caller's."""
    net, batch = torch.nn.Linear(2, 1), torch.zeros(3, 2)
    net.last = torch.ones(3, 2)
    torch_backend.save(net, path)
    net.last = batch
    torch_backend.load_into(net, path)
    assert net.last.tolist() == [[1, 1]] * 3
    assert not batch.any()


def test_the_memory_of_a_saved_model_is_written(torch_backend, tmp_path):
    net = torch.nn.Linear(3, 2)
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, net.parameters())
    torch_backend.save(net, tmp_path / "net.safetensors")
    saved = flat.clone()
    flat.zero_()
    torch_backend.load_into(net, tmp_path / "net.safetensors")
    assert torch.equal(flat, saved)
