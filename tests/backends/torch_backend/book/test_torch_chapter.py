"""The book's code for PyTorch: docs/d2l.md on the CPU and virtual GPUs, and the epochs of 3.4."""

import pytest
import torch
from book import expect, run_book, run_cells, run_tour
from processes import run_python

from d2ldev import Trainer
from d2ldev.native import NativeDevices

EPOCHS = """
@d2l.add_to_class(d2l.Trainer)
def prepare_model(self, model):
    model.trainer = self
    model.board.xlim = [0, self.max_epochs]
    if self.gpus:
        model.to(self.gpus[0])
    self.model = model

@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    batch = [torch.from_numpy(a) for a in batch]
    if self.gpus:
        batch = [d2l.to(a, self.gpus[0]) for a in batch]
    return batch

@d2l.add_to_class(d2l.Trainer)
def fit_epoch(self):
    self.model.train()
    for batch in self.train_dataloader:
        loss = self.model.training_step(self.prepare_batch(batch))
        self.optim.zero_grad()
        with torch.no_grad():
            loss.backward()
            if self.gradient_clip_val > 0:
                self.clip_gradients(self.gradient_clip_val, self.model)
            self.optim.step()
        self.train_batch_idx += 1
    if self.val_dataloader is None:
        return
    self.model.eval()
    for batch in self.val_dataloader:
        with torch.no_grad():
            self.model.validation_step(self.prepare_batch(batch))
        self.val_batch_idx += 1
"""


@pytest.mark.parametrize("virtual_gpus", [0, 2])
def test_the_books_code_runs(virtual_gpus):
    assert run_book("torch", EPOCHS, "trainer.model", virtual_gpus) == expect(virtual_gpus)


OWN_COUNT = """
import torch
from d2ldev.native import torch as d2l
show([d2l.num_gpus(), torch.cuda.device_count(), torch.cuda.is_available()])

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

show([str(X.device), names, str(torch.ones(2, 3, device=try_gpu()).device)])
"""


def test_the_framework_s_own_count_has_no_virtual_gpus_and_programs_that_ask_it_run():
    environment = {"D2LDEV_VIRTUAL_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}
    found = run_python(OWN_COUNT, hide=(), environment=environment)
    assert found == [[2, 0, False], ["cpu", [], "cpu"]]


def test_a_class_with_a_fit_of_its_own_is_the_books(torch_backend):
    """Section 3.2.4: the class as a whole has a fit of its own."""

    class Mine(Trainer):
        def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):
            self.save_hyperparameters()
            assert num_gpus == 0, "No GPU support yet"

        def fit(self, model, data):
            self.model, self.train_dataloader = model, data
            self.optim = torch.optim.SGD(model.parameters(), 0.1)
            for self.epoch in range(self.max_epochs):  # noqa: B020
                self.fit_epoch()

        def fit_epoch(self):
            for batch in self.train_dataloader:
                x, y = self.prepare_batch(batch)
                loss = ((self.model(x) - y) ** 2).mean()
                self.optim.zero_grad()
                loss.backward()
                self.optim.step()

    trainer, net = Mine(20), torch.nn.Linear(1, 1)
    trainer.backend = torch_backend
    trainer.fit(net, [(torch.ones(2, 1), torch.full((2, 1), 3.0))])
    torch.testing.assert_close(net(torch.ones(1, 1)), torch.tensor([[3.0]]), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("virtual_gpus", "first", "last"), [(0, "cpu", "cpu"), (2, "gpu:0", "gpu:1")]
)
def test_the_printed_cells_run_with_the_lines_of_the_page(virtual_gpus, first, last):
    assert run_cells("torch", "net", virtual_gpus) == [first, last, last, first]


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("torch") == [0, []]


def test_on_cuda_the_functions_return_its_devices(ledger):
    d2l = NativeDevices(ledger)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert [d2l.gpu(), d2l.try_gpu(1), d2l.try_all_gpus()] == [first, second, [first, second]]
    assert [d2l.gpu(7), d2l.try_gpu(7)] == [torch.device("cuda:7"), torch.device("cpu")]
