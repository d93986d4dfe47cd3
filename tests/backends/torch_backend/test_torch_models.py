"""``place`` of torch's modules: everything moves, parameters stay who they are."""

import warnings
from collections import deque
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from d2ldev import gpu
from d2ldev.framework.testing import framework_of

# Older versions of torch say so at every lazy layer.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

# -- torch's own layers ----------------------------------------------------------------------------


def linear():
    return nn.Linear(2, 3), torch.rand(4, 2)


def convolution_with_batch_norm():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    net(torch.rand(4, 1, 5, 5))  # running statistics other than the initial ones
    return net.eval(), torch.rand(4, 1, 5, 5)


def make_embedding():
    return nn.Embedding(5, 3), torch.tensor([0, 4, 4])


def lstm():
    return nn.LSTM(3, 4, num_layers=2, bidirectional=True), torch.rand(2, 1, 3)


def gru():
    return nn.GRU(3, 4), torch.rand(2, 1, 3)


def attention():
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return net.eval(), torch.rand(1, 2, 4)


def spectral_norm():
    return parametrizations.spectral_norm(nn.Linear(2, 3)).eval(), torch.rand(4, 2)


def weight_norm():
    return parametrizations.weight_norm(nn.Linear(2, 3)), torch.rand(4, 2)


def orthogonal():
    return parametrizations.orthogonal(nn.Linear(2, 2)), torch.rand(4, 2)


def script():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval())
    return net, torch.rand(4, 2)


def trace():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.trace(nn.Linear(2, 3), torch.rand(4, 2))
    return net, torch.rand(4, 2)


def data_parallel():
    # As on a machine without GPUs: other tests of this process may have made virtual ones.
    asked = "torch.nn.parallel.data_parallel._get_available_device_type"
    with mock.patch(asked, return_value=None):
        return nn.DataParallel(nn.Linear(2, 3)), torch.rand(4, 2)


MODELS = [
    linear,
    convolution_with_batch_norm,
    make_embedding,
    lstm,
    gru,
    attention,
    spectral_norm,
    weight_norm,
    orthogonal,
    script,
    trace,
    data_parallel,
]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model_and_input(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return request.param()


def test_everything_is_on_the_device_afterwards(ledger, model_and_input):
    model, _ = model_and_input
    ledger.place(model, gpu(1))
    assert set(ledger.placement(model).values()) == {gpu(1)}


def test_parameters_stay_the_same_objects(ledger, model_and_input):
    model, _ = model_and_input
    before = dict(model.named_parameters())
    ledger.place(model, gpu(1))
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in (*before, *after))


def test_the_state_dict_has_the_same_names_and_values(ledger, model_and_input):
    model, _ = model_and_input
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ledger.place(model, gpu(1))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_output_is_the_same_to_the_last_bit(ledger, model_and_input):
    model, x = model_and_input
    before = output(model, x)
    ledger.place(model, gpu(1))
    assert torch.equal(output(model, x), before)


def test_every_tensor_is_copied_once(ledger, model_and_input, copies):
    model, _ = model_and_input
    ledger.place(model, gpu(1))
    assert len({id(x) for x in copies.copied}) == len(copies.copied)


def output(model, x):
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def test_the_running_statistics_go_on_after_the_move(ledger):
    moved, twin = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    ledger.place(moved, gpu())
    x = torch.rand(8, 2)
    moved(x)
    twin(x)
    assert torch.equal(moved.running_mean, twin.running_mean)
    assert moved.num_batches_tracked.item() == 1


def test_the_flat_weights_of_a_recurrent_layer_are_its_parameters(ledger):
    net = nn.LSTM(3, 4, bidirectional=True)
    ledger.place(net, gpu())
    named = [getattr(net, name) for name in net._flat_weights_names]
    assert all(flat is weight for flat, weight in zip(net._flat_weights, named, strict=True))


def test_a_recurrent_layer_is_flattened_again(ledger, monkeypatch):
    net = nn.GRU(3, 4)
    flattened = []
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda self: flattened.append(self))
    ledger.place(nn.Sequential(net), gpu())
    assert flattened == [net]


def test_a_recurrent_layer_that_is_there_is_not_flattened(torch_backend, monkeypatch):
    net = nn.GRU(3, 4)
    flattened = []
    monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda self: flattened.append(self))
    torch_backend.place(net, "cpu")
    assert flattened == []


def test_flattening_that_runs_out_of_memory_leaves_the_layer_moved(ledger, monkeypatch):
    def fails(self):
        raise torch.OutOfMemoryError("no piece is large enough")

    net = nn.GRU(3, 4)
    monkeypatch.setattr(nn.GRU, "flatten_parameters", fails)
    ledger.place(net, gpu())
    assert set(ledger.placement(net).values()) == {gpu()}


def test_a_non_persistent_buffer_moves(ledger):
    net = nn.Module()
    net.register_buffer("mask", torch.ones(2), persistent=False)
    ledger.place(net, gpu())
    assert ledger.device_of(net.mask) is gpu()
    assert "mask" not in net.state_dict()


def test_a_buffer_is_still_a_buffer(ledger):
    net = nn.Module()
    net.register_buffer("mask", torch.ones(2))
    ledger.place(net, gpu())
    assert dict(net.named_buffers())["mask"] is net.mask


def test_an_absent_bias_stays_none(ledger):
    net = nn.Linear(2, 3, bias=False)
    ledger.place(net, gpu())
    assert net.bias is None


def test_hooks_stay_registered(ledger):
    net = nn.Linear(2, 3)
    seen = []
    net.register_forward_hook(lambda module, inputs, y: seen.append(module))
    ledger.place(net, gpu())
    net(torch.ones(1, 2))
    assert seen == [net]


def test_training_and_evaluation_mode_stay(ledger):
    net = nn.Sequential(nn.Dropout().eval(), nn.Dropout())
    net.register_buffer("x", torch.ones(1))
    ledger.place(net, gpu())
    assert [module.training for module in net] == [False, True]


def test_a_parameter_that_is_a_view_moves_with_its_values_alone(ledger):
    base = torch.arange(6.0).reshape(2, 3)
    net = nn.ParameterList([nn.Parameter(base[0]), nn.Parameter(base[1])])
    ledger.place(net, gpu())
    assert [parameter.tolist() for parameter in net] == [[0, 1, 2], [3, 4, 5]]


def test_a_compiled_model_moves_with_the_model_that_it_wraps(ledger):
    net = nn.Linear(2, 3)
    compiled = torch.compile(net, backend="eager")  # which compiles at the first call only
    assert ledger.place(compiled, gpu()) is compiled
    assert set(ledger.placement(net).values()) == {gpu()}


def test_a_model_without_memory_is_refused_with_the_way_out(torch_backend):
    with pytest.raises(TypeError, match="to_empty"):
        torch_backend.place(nn.Linear(2, 3, device="meta"), "cpu")


# -- the mlp ---------------------------------------------------------------------------------------


def test_an_mlp_s_parameters_are_leaves_that_train(torch_backend):
    net = torch_backend.mlp([3, 4, 1])
    net(torch.ones(2, 3)).sum().backward()
    assert all(parameter.is_leaf and parameter.grad is not None for parameter in net.parameters())


# -- what a module keeps besides parameters --------------------------------------------------------


def keep(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_modules_in_a_plain_list_move(ledger):
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    net = ledger.place(keep(layers=layers), gpu())
    assert ledger.device_of(layers[1].weight) is gpu()
    assert net.layers is layers


@pytest.mark.parametrize(
    "kept",
    [
        nn.ModuleList([nn.Linear(1, 1)]),
        nn.ModuleDict({"a": nn.Linear(1, 1)}),
        nn.ParameterList([nn.Parameter(torch.ones(1)), torch.ones(1)]),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": torch.ones(1)}),
    ],
    ids=lambda kept: type(kept).__name__,
)
def test_torch_s_own_containers_move_with_all_they_hold(ledger, kept):
    ledger.place(keep(kept=kept), gpu())
    assert set(ledger.placement(kept).values()) == {gpu()}


def test_a_scratch_parameter_stays_the_same_object(ledger):
    # As the book writes a model from scratch: tensors with gradients in a list.
    w, b = torch.ones(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    net = keep(params=[w, b])
    ledger.place(net, gpu())
    assert net.params[0] is w
    assert ledger.device_of(w) is gpu()


def test_a_scratch_parameter_still_needs_gradients(ledger):
    w = torch.ones(2, requires_grad=True)
    ledger.place(keep(w=w), gpu())
    (w * 3).sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_frozen_parameter_stays_the_same_object_and_frozen(ledger):
    net = nn.Linear(2, 3).requires_grad_(False)
    weight = net.weight
    ledger.place(net, gpu())
    assert net.weight is weight
    assert not weight.requires_grad


def test_the_gradient_of_a_tensor_that_stays_is_moved_to_it(ledger):
    net = ledger.place(nn.Linear(2, 1), gpu())
    net.weight.grad = torch.ones(1, 2)
    ledger.place(net, gpu())
    assert ledger.device_of(net.weight.grad) is gpu()


def test_gradient_hooks_stay(ledger):
    w = torch.ones(2, requires_grad=True)
    w.register_hook(lambda gradient: gradient * 10)
    ledger.place(keep(w=w), gpu())
    w.sum().backward()
    assert w.grad.tolist() == [10, 10]


def test_a_parameter_of_a_subclass_keeps_its_type_and_attributes(ledger):
    class Named(nn.Parameter):
        pass

    net = nn.Module()
    net.weight = Named(torch.ones(2))
    net.weight.axis = "rows"
    ledger.place(net, gpu())
    assert type(net.weight) is Named
    assert net.weight.axis == "rows"


def test_a_parameter_that_wraps_tensors_takes_them_with_it(torch_backend):
    net = nn.Module()
    net.weight = weight = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    refill = framework_of(torch_backend).models.find_refill(weight)
    refill(torch.empty_like(weight, device="meta"))
    assert net.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.a.is_meta


def test_a_property_is_not_evaluated(ledger):
    class Counting(nn.Linear):
        asked = 0

        @property
        def scale(self):
            type(self).asked += 1
            return torch.ones(1)

    ledger.place(Counting(1, 1), gpu())
    assert Counting.asked == 0


def test_an_overridden_setattr_is_not_called(ledger):
    class Refusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.__dict__["table"] = torch.ones(1)

        def __setattr__(self, name, value):
            if name == "table":
                raise AttributeError("read-only")
            super().__setattr__(name, value)

    net = ledger.place(Refusing(), gpu())
    assert ledger.device_of(net.table) is gpu()


def test_a_tensor_in_a_slot_moves(ledger):
    class Slotted(nn.Module):
        __slots__ = ("never_set", "table")

    net = Slotted()
    net.table = torch.ones(1)
    ledger.place(net, gpu())
    assert ledger.device_of(net.table) is gpu()


def test_an_attribute_of_an_unknown_type_is_passed_over(ledger):
    unknown = object()
    net = ledger.place(keep(unknown=unknown, x=torch.ones(1)), gpu())
    assert net.unknown is unknown


def test_tensors_in_an_attribute_s_containers_move_and_the_containers_are_made_anew(ledger):
    trained = torch.ones(1, requires_grad=True)
    kept = {"a": [torch.ones(1), (torch.ones(1), 2)], "b": deque([trained], maxlen=3)}
    before = kept["a"][0]
    net = ledger.place(keep(kept=kept), gpu())
    assert set(ledger.placement(net).values()) == {gpu()}
    assert net.kept["b"].maxlen == 3
    assert kept["a"][0] is before


# -- lazy layers -----------------------------------------------------------------------------------


def lazy_net():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))


def test_before_the_first_input_the_parameters_move(ledger):
    net = ledger.place(lazy_net(), gpu(1))
    assert set(ledger.placement(net).values()) == {gpu(1)}


def test_before_the_first_input_the_parameters_stay_the_same_objects(ledger):
    net = lazy_net()
    weight = net[0].weight
    ledger.place(net, gpu())
    assert net[0].weight is weight
    assert isinstance(weight, UninitializedParameter)


def test_moved_before_the_first_input_the_model_is_initialised_by_it(ledger):
    net = ledger.place(lazy_net(), gpu())
    assert net(torch.ones(3, 2)).shape == (3, 1)
    assert net[0].weight.shape == (4, 2)


def test_the_first_input_makes_the_parameters_on_the_device(meta):
    net = meta.place(lazy_net(), "gpu")
    net(meta.ones((3, 2), device="gpu"))
    assert set(meta.placement(net).values()) == {gpu()}
    assert net[0].weight.shape == (4, 2)


def test_an_optimizer_made_before_the_first_input_trains_the_moved_model(ledger):
    net = ledger.place(nn.LazyLinear(1), gpu())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net(torch.ones(1, 2)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    assert torch.equal(net.weight, before - 1)


def test_after_the_first_input_the_parameters_move(ledger):
    net = lazy_net()
    before = net(torch.ones(3, 2))
    ledger.place(net, gpu())
    assert set(ledger.placement(net).values()) == {gpu()}
    assert torch.equal(net(torch.ones(3, 2)), before)


def test_lazy_buffers_move_before_the_first_input(ledger):
    net = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d())
    ledger.place(net, gpu())
    assert set(ledger.placement(net).values()) == {gpu()}


def test_lazy_buffers_that_moved_are_initialised_by_the_first_input(ledger):
    net = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d())
    ledger.place(net, gpu())
    net(torch.rand(2, 1, 5, 5))
    assert net[1].running_mean.shape == (2,)
    assert type(net[1].running_mean) is torch.Tensor


def test_lazy_buffers_are_made_on_the_device(meta):
    net = meta.place(nn.LazyBatchNorm1d(), "gpu")
    net(meta.ones((3, 2), device="gpu"))
    assert net.running_mean.is_meta
