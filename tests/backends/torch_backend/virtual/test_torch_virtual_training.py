"""Training on a virtual GPU: the CPU's losses, parameters and gradients, to the last bit."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from d2ldev.errors import UnsupportedValueError

# -- training --------------------------------------------------------------------------------------


CPU = torch.device("cpu")


class Classifier(nn.Module):
    """A small convolutional network: all that the book's image models are made of."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.GELU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(6, 10)),
        )

    def forward(self, x):
        return self.net(x)


class Tagger(nn.Module):
    """A small transformer encoder: embedding, attention, layer normalisation, dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=x == 0)).mean(1)


class Recurrent(nn.Module):
    """A recurrent network of the class that is asked for."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.rnn = kind(8, 6, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0][:, -1])


def images():
    return torch.randn(16, 1, 8, 8)


def tokens():
    x = torch.randint(1, 12, (16, 7))
    x[::3, 4:] = 0
    return x


def train(model, inputs, make_optimizer, device, steps=5):
    """Return the losses, and the state of the model afterwards, on the CPU."""
    torch.manual_seed(0)
    net, x, y = model().to(device), inputs().to(device), torch.randint(0, 10, (16,)).to(device)
    optimizer, losses = make_optimizer(net.parameters()), []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    net.eval()
    with torch.no_grad():
        losses.append(net(x).sum().item())
    assert {value.device for value in net.state_dict().values()} == {device}
    return losses, {name: value.cpu() for name, value in net.state_dict().items()}


def assert_same_training(device, *how):
    expected_losses, expected = train(*how, CPU)
    losses, state = train(*how, device)
    assert losses == expected_losses
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    assert losses[0] != losses[-2]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_a_convolutional_network_trains_as_on_the_cpu(place, optimizer):
    assert_same_training(place, Classifier, images, optimizer)


# torch warns of the nested tensors that it makes of a padded batch.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_a_transformer_encoder_trains_as_on_the_cpu(place, optimizer):
    assert_same_training(place, Tagger, tokens, optimizer)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_network_trains_as_on_the_cpu(vgpu, kind):
    assert_same_training(vgpu, lambda: Recurrent(kind), tokens, adam)


OPTIMIZERS = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    # One takes sparse gradients only, and one matrices only.
    if name not in ("Optimizer", "SparseAdam", "Muon")
}
# On a GPU, torch's default is ``foreach=True``, which adds in another order in these.
ROUNDED = {"ASGD", "NAdam", "RAdam"}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS - ROUNDED))
def test_an_optimizer_with_default_arguments_steps_as_on_the_cpu(vgpu, name):
    def make(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01)

    assert_same_training(vgpu, Classifier, images, make)


@pytest.mark.parametrize("name", sorted(ROUNDED))
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_steps_as_on_the_cpu_in_the_same_order_of_additions(vgpu, name, foreach):
    def make(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01, foreach=foreach)

    assert_same_training(vgpu, Classifier, images, make)


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_an_optimizer_in_another_order_of_additions_steps_as_on_the_cpu_to_rounding(vgpu, name):
    def make(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01)

    (losses, _), (expected, _) = (train(Classifier, images, make, d) for d in (vgpu, CPU))
    assert losses[:-1] == pytest.approx(expected[:-1], rel=1e-3)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_an_optimizer_steps_in_one_piece_as_on_the_cpu(vgpu, name, way):
    def make(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01, **{way: True})

    assert_same_training(vgpu, Classifier, images, make)


def test_threads_train_on_different_virtual_gpus_at_once(virtual):
    states = {}

    def work(number):
        device = torch.device("vgpu", number % 2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        model.to(device)
        optimizer = momentum(model.parameters())
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(3, 4, device=device)).square().mean().backward()
            optimizer.step()
        states[number] = [parameter.cpu() for parameter in model.parameters()]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(states) == [0, 1, 2, 3]
    assert all(
        torch.equal(a, b)
        for state in states.values()
        for a, b in zip(state, states[0], strict=True)
    )


@pytest.mark.parametrize("pin", [False, True])
def test_batches_of_a_data_loader_arrive(vgpu, pin):
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 3, pin_memory=pin)
    moved = [x.to(vgpu, non_blocking=True) for (x,) in loader]
    assert [x.device for x in moved] == [vgpu] * 2
    assert [x.tolist() for x in moved] == [[0, 1, 2], [3, 4, 5]]


def test_workers_of_a_data_loader_are_forked(vgpu):
    torch.ones(3, device=vgpu)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), 3, num_workers=2)
    assert [x.to(vgpu).sum().item() for (x,) in loader] == [3, 12]


def test_batches_that_workers_make_on_a_virtual_gpu_are_refused(vgpu):
    loader = DataLoader(TensorDataset(torch.arange(6.0, device=vgpu)), 3, num_workers=1)
    with pytest.raises(RuntimeError, match="belongs to this process"):
        next(iter(loader))


def test_a_gradient_is_clipped_as_on_the_cpu(vgpu):
    def norm(device):
        torch.manual_seed(0)
        net = Classifier().to(device)
        net(images().to(device)).sum().backward()
        return nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()

    assert norm(vgpu) == norm(CPU)


def test_gradients_are_scaled(vgpu):
    net = nn.Linear(2, 2).to(vgpu)
    scaler, optimizer = torch.amp.GradScaler("vgpu"), momentum(net.parameters())
    scaler.scale(net(torch.ones(1, 2, device=vgpu)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert {p.grad.device for p in net.parameters()} == {vgpu}
    assert scaler.get_scale() == 2.0**16


def test_autocast_computes_as_the_cpus_does(vgpu):
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = net(x)
    net.to(vgpu)
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        y = net(x.to(vgpu))
    assert (y.device, y.dtype) == (vgpu, torch.bfloat16)
    assert torch.equal(y.cpu(), expected)


def test_a_model_is_trained_under_autocast_as_on_the_cpu(vgpu):
    def losses(device):
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Conv1d(5, 5, 2), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(15, 3), nn.Softmax(-1)),
        ).to(device)
        optimizer = momentum(net.parameters())
        tokens, labels = torch.arange(10).reshape(2, 5) % 9, torch.tensor([0, 2])
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(tokens.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(vgpu) == losses(CPU)


LAYERS_OF_SEVERAL_OPERATORS = {
    "lstm": lambda: nn.LSTM(4, 4),
    "gru": lambda: nn.GRU(4, 4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "normalisation": lambda: nn.GroupNorm(1, 3),
}


# Of the context below, which sets another of oneDNN's flags as well.
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("name", sorted(LAYERS_OF_SEVERAL_OPERATORS))
def test_autocast_reaches_what_a_layer_is_composed_of(vgpu, name):
    torch.manual_seed(0)
    net, x = LAYERS_OF_SEVERAL_OPERATORS[name](), torch.randn(2, 3, 4)

    def compute(device):
        # Without oneDNN, which has an LSTM in bfloat16 for some CPUs only.
        with (
            torch.backends.mkldnn.flags(enabled=False),
            torch.autocast(device.type, torch.bfloat16),
        ):
            y = net.to(device)(x.to(device))
        return (y[0] if isinstance(y, tuple) else y).cpu()

    expected, y = compute(CPU), compute(vgpu)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


def test_autocast_reaches_what_a_kernel_calls(vgpu):
    torch.manual_seed(0)
    net, x = nn.Bilinear(4, 4, 2), torch.randn(3, 4)
    plain = net(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = net(x, x)
        not_asked = net.to(vgpu)(x.to(vgpu), x.to(vgpu))
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        y = net(x.to(vgpu), x.to(vgpu))
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(not_asked.cpu(), plain)


def test_the_cpus_autocast_is_not_about_virtual_gpus(vgpu):
    x = torch.ones(2, 2, device=vgpu)
    with torch.autocast("cpu"):
        assert (x @ x + 2).dtype == torch.float32


# -- gradients -------------------------------------------------------------------------------------


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


class OnHardware(torch.Tensor):
    """A tensor that says of itself that it is on a real GPU."""

    is_cuda = True
    device = torch.device("cuda:0")


@pytest.mark.usefixtures("vgpu")
def test_gradients_on_a_real_gpu_are_refused_with_the_reason():
    def fail(gradient):
        raise RuntimeError("no stream")  # stands for the assertion of torch's engine

    x = torch.ones(2, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(UnsupportedValueError, match="compute gradients on cuda:0") as caught:
        x.sum().as_subclass(OnHardware).backward()
    assert str(caught.value.__cause__) == "no stream"


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
def test_forward_derivatives_are_right(x, place):
    with forward_ad.dual_level():
        y = torch.sin(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(y).tangent
    assert tangent.device == place
    assert torch.equal(tangent, x.detach().cos())


@pytest.mark.parametrize(
    "function", [lambda y: y * y, attend, lambda y: functional.dropout(y, 0.5)]
)
def test_operands_that_a_gradient_needs_may_not_change(x, function):
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
