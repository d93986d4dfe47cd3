"""The PyTorch tab of the chapter "GPUs" as it is printed, on the CPU and on two virtual GPUs."""

import torch
from book import BOOKS_BATCHES, BOOKS_RUN, BOOKS_TRAINER, run_chapter, run_tour

from d2ldev.native import NativeDevices

CHAPTER = """
# 6.7.1 Computing Devices
from d2ldev.native import torch as d2l
import torch
from torch import nn

# Of ``EXCEPTIONS``: in the place of the chapter's definitions.
cpu, gpu, num_gpus = d2l.cpu, d2l.gpu, d2l.num_gpus
try_gpu, try_all_gpus = d2l.try_gpu, d2l.try_all_gpus

show_as('named', cpu(), gpu(), gpu(1))
show_as('the number', num_gpus())
show_as('tried', try_gpu(), try_gpu(10), try_all_gpus())

# 6.7.2 Tensors and GPUs
x = torch.tensor([1, 2, 3])
show_as('x', x.device)

X = torch.ones(2, 3, device=try_gpu())
Y = torch.rand(2, 3, device=try_gpu(1))
show_as('X and Y', X.device, Y.device)

if num_gpus() > 1:
    # On the CPU alone these cells are PyTorch's error, in the book as well.
    Z = X.cuda(1)
    show_as('X and Z', X.device, Z.device, X.sum().item() == Z.sum().item() == 6)
    show_as('Y + Z', (Y + Z).device, torch.equal((Y + Z).cpu(), Y.cpu() + 1))
    show_as('Z.cuda(1) is Z', Z.cuda(1) is Z)

# 6.7.3 Neural Networks and GPUs
net = nn.Sequential(nn.LazyLinear(1))
net = net.to(device=try_gpu())

show_as('net(X)', net(X).device, list(net(X).shape))
show_as('net', net[0].weight.data.device)

"""
CHAPTER += BOOKS_TRAINER + BOOKS_BATCHES
CHAPTER += """
@d2l.add_to_class(d2l.Trainer)
def prepare_model(self, model):
    model.trainer = self
    model.board.xlim = [0, self.max_epochs]
    if self.gpus:
        model.to(self.gpus[0])
    self.model = model

class LinearRegression(d2l.Module):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.LazyLinear(1)

    def loss(self, y_hat, y):
        return nn.MSELoss()(y_hat, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

as_tensor = torch.tensor
"""
CHAPTER += BOOKS_RUN
CHAPTER += """
show_as('trained', model.net.weight.device)
model = nn.Linear(3, 1)
model.board = SimpleNamespace()
trainer = d2l.Trainer(max_epochs=1, num_gpus=1)
trainer.prepare_model(model)
X, y = trainer.prepare_batch([torch.ones(2, 3), torch.ones(2, 1)])
loss = ((trainer.model(X) - y) ** 2).mean()
loss.backward()
show_as('trainer', X.device, y.device, loss.device, model.weight.grad.device)
"""


OWN_COUNT = """
import torch
from d2ldev.native import torch as d2l
show_as('counts', d2l.num_gpus(), torch.cuda.device_count(), torch.cuda.is_available())

# What most programs ask the count for. ``torch.device('cuda')`` is not a virtual GPU.
X = torch.ones(2, device='cuda' if torch.cuda.is_available() else 'cpu')
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

# The chapter's own functions.
def gpu(i=0):
    return torch.device(f'cuda:{i}')

def num_gpus():
    return torch.cuda.device_count()

def try_gpu(i=0):
    if num_gpus() >= i + 1:
        return gpu(i)
    return torch.device('cpu')

show_as('programs', X.device, names, torch.ones(2, 3, device=try_gpu()).device)
"""


def test_the_framework_s_own_count_has_no_virtual_gpus_and_programs_that_ask_it_run():
    assert run_chapter(OWN_COUNT, virtual_gpus=2) == {
        "counts": [2, 0, False],
        "programs": ["cpu", [], "cpu"],
    }


def test_on_the_cpu_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=0) == {
        "named": ["cpu", "cuda:0", "cuda:1"],
        "the number": [0],
        "tried": ["cpu", "cpu", ["cpu"]],
        "x": ["cpu"],
        "X and Y": ["cpu", "cpu"],
        "net(X)": ["cpu", [2, 1]],
        "net": ["cpu"],
        "fit": [True, 10],
        "trained": ["cpu"],
        "trainer": ["cpu"] * 4,
    }


def test_on_two_virtual_gpus_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=2) == {
        "named": ["cpu", "vgpu:0", "vgpu:1"],
        "the number": [2],
        "tried": ["vgpu:0", "cpu", ["vgpu:0", "vgpu:1"]],
        "x": ["cpu"],
        "X and Y": ["vgpu:0", "vgpu:1"],
        "X and Z": ["vgpu:0", "vgpu:1", True],
        "Y + Z": ["vgpu:1", True],
        "Z.cuda(1) is Z": [True],
        "net(X)": ["vgpu:0", [2, 1]],
        "net": ["vgpu:0"],
        "fit": [True, 10],
        "trained": ["vgpu:0"],
        "trainer": ["vgpu:0"] * 4,
    }


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("torch") == [0, []]


def test_on_cuda_the_functions_return_its_devices(ledger):
    d2l = NativeDevices(ledger)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert [d2l.gpu(), d2l.try_gpu(1), d2l.try_all_gpus()] == [first, second, [first, second]]
    assert [d2l.gpu(7), d2l.try_gpu(7)] == [torch.device("cuda:7"), torch.device("cpu")]
