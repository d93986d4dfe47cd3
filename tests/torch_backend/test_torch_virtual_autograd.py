"""Gradients on virtual GPUs: through moves, on every index, of every kind that torch has."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def attend(x):
    return functional.scaled_dot_product_attention(x, x, x)


@pytest.fixture
def x(place):
    torch.manual_seed(0)
    return torch.randn(2, 2, 4, dtype=torch.float64).to(place).requires_grad_()


def test_a_gradient_goes_through_moves(virtual):
    x = torch.ones(2, requires_grad=True)
    y = x.to("vgpu:0") * 2
    z = y.to("vgpu:1") * 3
    z.cpu().sum().backward()
    assert (y.device.index, z.device.index, x.grad.device.type) == (0, 1, "cpu")
    assert x.grad.tolist() == [6, 6]


def test_a_gradient_is_where_its_tensor_is(x, place):
    (x**2).sum().backward()
    assert x.grad.device == place
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_thread_that_has_done_nothing_else_goes_backward(vgpu):
    x = torch.ones(2, device=vgpu, requires_grad=True)
    y, gradient, results = x * 2, torch.ones(2, device=vgpu), []
    thread = threading.Thread(
        target=lambda: results.extend(torch.autograd.grad(y, x, grad_outputs=gradient))
    )
    thread.start()
    thread.join()
    assert [gradient.tolist() for gradient in results] == [[2, 2]]


def test_a_backward_pass_leaves_the_threads_setting_alone(x):
    before = torch.autograd.is_multithreading_enabled()
    x.sum().backward()
    assert torch.autograd.is_multithreading_enabled() == before


@pytest.mark.parametrize("function", [torch.sin, attend, lambda x: functional.conv1d(x, x[:1])])
def test_gradients_and_their_gradients_are_right(x, function):
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_the_gradient_of_a_recurrent_layer_is_right(x, place):
    layer = nn.LSTM(4, 3).double().to(place)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,))


# torch compiles its own rules for them with what it deprecates.
_OWN_RULES = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@_OWN_RULES
@pytest.mark.parametrize("function", [torch.sin, attend])
def test_forward_derivatives_are_right(x, place, function):
    with forward_ad.dual_level():
        y = function(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(y).tangent
    with forward_ad.dual_level():
        host = x.detach().cpu()
        y = function(forward_ad.make_dual(host, torch.ones_like(host)))
        expected = forward_ad.unpack_dual(y).tangent
    assert tangent.device == place
    assert torch.equal(tangent.cpu(), expected)


@pytest.mark.parametrize(
    "function", [lambda y: y * y, attend, lambda y: functional.dropout(y, 0.5)]
)
def test_what_a_gradient_needs_may_not_change(x, function):
    y = x * 1
    z = function(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (z * y.detach()).sum().backward()


def test_a_leaf_may_not_change(x):
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)


def test_a_change_of_a_view_is_followed(place):
    x = torch.ones(3, device=place, requires_grad=True)
    y = x * 1
    y[0].mul_(5)
    y.sum().backward()
    assert x.grad.tolist() == [5, 1, 1]


def test_hooks_are_called_with_tensors_of_the_device(place):
    net, seen = nn.Linear(2, 2).to(place), []
    net.register_forward_hook(lambda module, inputs, output: seen.append(output.device))
    net.register_full_backward_hook(lambda module, before, after: seen.append(after[0].device))
    net.weight.register_hook(lambda gradient: seen.append(gradient.device))
    net(torch.ones(1, 2, device=place, requires_grad=True)).sum().backward()
    assert seen == [place] * 3


HOOKS = {
    "of a tensor": lambda y, hook: y.register_hook(hook),
    "before a node": lambda y, hook: y.grad_fn.register_prehook(hook),
    "after a node": lambda y, hook: y.grad_fn.register_hook(hook),
}


@pytest.mark.parametrize("name", sorted(HOOKS))
@pytest.mark.parametrize("error", [ValueError("in a hook"), KeyboardInterrupt()])
def test_an_error_in_a_hook_is_raised(x, name, error):
    def hook(*_):
        raise error

    y = x * 2
    HOOKS[name](y, hook)
    with pytest.raises(type(error)) as caught:
        y.sum().backward()
    assert caught.value is error


def test_an_error_while_a_saved_tensor_is_unpacked_is_raised(x):
    def unpack(saved):
        raise KeyError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        y = x * x
    with pytest.raises(KeyError, match="unpacked"):
        y.sum().backward()


def test_after_an_error_in_a_hook_gradients_are_computed(x):
    def hook(_):
        raise ValueError("once")

    y = x * 2
    y.register_hook(hook)
    with pytest.raises(ValueError, match="once"):
        y.sum().backward()
    (x * 3).sum().backward()
    assert x.grad.unique().tolist() == [3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_in_what_a_checkpoint_computes_again_is_raised(x, reentrant):
    def once(x):
        once.calls += 1
        if once.calls > 1:
            raise ValueError("again")
        return x * x

    once.calls = 0
    y = checkpoint(once, x, use_reentrant=reentrant)
    with pytest.raises(ValueError, match="again"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_numbers_again(place, reentrant):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(place)

    def gradient(run):
        torch.manual_seed(3)
        x = torch.ones(5, 4, device=place, requires_grad=True)
        run(x).sum().backward()
        return x.grad

    again = gradient(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    assert torch.equal(again, gradient(net))


def test_saved_tensors_wait_on_the_cpu(place):
    x = torch.ones(3, device=place, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).sum()
    y.backward()
    assert (x.grad.device, x.grad.tolist()) == (place, [2, 2, 2])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(place, context):
    net, x = nn.TransformerEncoderLayer(4, 2, 8).to(place).eval(), torch.ones(3, 1, 4, device=place)
    with context():
        y, z = net(x), nn.LSTM(4, 2).to(place)(x)[0]
    assert [y.device, z.device] == [place, place]
    assert not y.requires_grad
    assert y.is_inference() == (context is torch.inference_mode)


@pytest.mark.parametrize("function", [torch.sin, attend], ids=["sin", "attention"])
def test_functions_are_transformed(x, place, function):
    x = x.detach()
    gradient = torch.func.grad(lambda x: function(x).sum())(x)
    batched = torch.func.vmap(function)(x)
    assert (gradient.device, batched.device) == (place, place)
    expected = torch.func.grad(lambda x: function(x).sum())(x.cpu())
    assert torch.allclose(gradient.cpu(), expected, rtol=1e-12)


@_OWN_RULES
def test_jacobians_are_computed(place):
    x = torch.arange(3.0, device=place)
    assert torch.func.jacrev(torch.sin)(x).diagonal().tolist() == x.cos().tolist()
    assert torch.func.jacfwd(torch.sin)(x).diagonal().tolist() == x.cos().tolist()


def test_gradients_per_sample_are_computed(place):
    net = nn.Linear(2, 1).to(place)
    parameters = dict(net.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, (x,)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))
    assert gradients(parameters, torch.ones(5, 2, device=place))["weight"].shape == (5, 1, 2)


@pytest.mark.parametrize("move", [lambda m, d: m.to(d), lambda m, d: m.vgpu(d.index)])
def test_a_parameter_that_moves_is_the_same_object(vgpu, move):
    net = nn.Linear(2, 2)
    weight = net.weight
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    move(net, vgpu)
    net(torch.ones(1, 2, device=vgpu)).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert net.weight is weight
    assert torch.equal(weight.detach(), before - 1)


def test_layers_are_made_lazily_and_in_no_place(vgpu):
    lazy = nn.LazyLinear(3).to(vgpu)
    y = lazy(torch.ones(2, 4, device=vgpu))
    nowhere = nn.Linear(2, 2, device="meta").to_empty(device=vgpu)
    assert [y.device, lazy.weight.device, nowhere.weight.device] == [vgpu] * 3


def test_parametrized_layers_train(vgpu):
    for parametrize in (
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ):
        net = parametrize(nn.Linear(2, 2)).to(vgpu)
        net(torch.ones(1, 2, device=vgpu)).sum().backward()
        assert {parameter.grad.device for parameter in net.parameters()} == {vgpu}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_a_group_normalisation_is_the_cpus_in_every_order_of_memory(vgpu, layout):
    def gradients(device):
        torch.manual_seed(0)
        x = torch.randn(2, 6, 9, 9).contiguous(memory_format=layout).to(device).requires_grad_()
        net = torch.nn.GroupNorm(3, 6).to(device)
        (net(x) * torch.randn(2, 6, 9, 9).to(device)).sum().backward()
        return [y.grad.cpu() for y in (x, *net.parameters())]

    expected = gradients(torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(gradients(vgpu), expected, strict=True))
