"""Training on a virtual GPU: the CPU's losses and parameters, to the last bit."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    """The losses, and the state of the model afterwards, on the CPU."""
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


@pytest.mark.parametrize("name", sorted(LAYERS_OF_SEVERAL_OPERATORS))
def test_autocast_reaches_what_a_layer_is_composed_of(vgpu, name):
    torch.manual_seed(0)
    net, x = LAYERS_OF_SEVERAL_OPERATORS[name](), torch.randn(2, 3, 4)

    def computed(device):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = net.to(device)(x.to(device))
        return (y[0] if isinstance(y, tuple) else y).cpu()

    expected, y = computed(CPU), computed(vgpu)
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
