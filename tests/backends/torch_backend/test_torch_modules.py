"""``place`` of torch's own layers: everything moves, parameters stay who they are."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from d2ldev import cpu, gpu


def linear():
    return nn.Linear(2, 3), torch.rand(4, 2)


def convolution_with_batch_norm():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    net(torch.rand(4, 1, 5, 5))  # running statistics other than the initial ones
    return net.eval(), torch.rand(4, 1, 5, 5)


def embedding():
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


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval())
    return net, torch.rand(4, 2)


def traced():
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
    embedding,
    lstm,
    gru,
    attention,
    spectral_norm,
    weight_norm,
    orthogonal,
    scripted,
    traced,
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


def test_the_module_itself_comes_back(ledger, model_and_input):
    model, _ = model_and_input
    assert ledger.place(model, gpu(1)) is model


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


def test_every_tensor_is_copied_once(ledger, model_and_input):
    model, _ = model_and_input
    ledger.place(model, gpu(1))
    assert len({id(x) for x in ledger.copied}) == len(ledger.copied)


def test_there_and_back_is_on_the_cpu_again(ledger, model_and_input):
    model, _ = model_and_input
    ledger.place(model, gpu(0))
    ledger.place(model, cpu())
    assert set(ledger.placement(model).values()) == {cpu()}


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


@pytest.mark.parametrize("number", range(2))
def test_on_a_device_of_torch_itself_parameters_keep_their_identity(meta, number):
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = list(net.parameters())
    meta.place(net, "gpu")
    assert list(net.parameters())[number] is before[number]
    assert before[number].device == torch.device("meta")


def test_a_model_without_memory_is_refused_with_the_way_out(torch_backend):
    with pytest.raises(TypeError, match="to_empty"):
        torch_backend.place(nn.Linear(2, 3, device="meta"), "cpu")
