"""The book's code for MXNet: docs/d2l.md on the CPU and on virtual GPUs, and the epochs of 3.4."""

import pytest
from book import expect, run_book, run_cells, run_tour

EPOCHS = """
from mxnet import autograd

@d2l.add_to_class(d2l.Module)
def set_scratch_params_device(self, device):
    for attr in dir(self):
        a = getattr(self, attr)
        if isinstance(a, np.ndarray):
            with autograd.record():
                setattr(self, attr, a.as_in_ctx(device))
            getattr(self, attr).attach_grad()
        if isinstance(a, d2l.Module):
            a.set_scratch_params_device(device)
        if isinstance(a, list):
            for elem in a:
                elem.set_scratch_params_device(device)

@d2l.add_to_class(d2l.Trainer)
def prepare_model(self, model):
    model.trainer = self
    model.board.xlim = [0, self.max_epochs]
    if self.gpus:
        model.collect_params().reset_ctx(self.gpus[0])
        model.set_scratch_params_device(self.gpus[0])
    self.model = model

@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    batch = [np.array(a) for a in batch]
    if self.gpus:
        batch = [d2l.to(a, self.gpus[0]) for a in batch]
    return batch

@d2l.add_to_class(d2l.Trainer)
def fit_epoch(self):
    for batch in self.train_dataloader:
        with autograd.record():
            loss = self.model.training_step(self.prepare_batch(batch))
        loss.backward()
        if self.gradient_clip_val > 0:
            self.clip_gradients(self.gradient_clip_val, self.model)
        self.optim.step(1)
        self.train_batch_idx += 1
    if self.val_dataloader is None:
        return
    for batch in self.val_dataloader:
        self.model.validation_step(self.prepare_batch(batch))
        self.val_batch_idx += 1

class Scratch(d2l.Module):
    def __init__(self):
        super().__init__()
        self.w = np.ones((3, 1))

if d2l.num_gpus():
    scratch = Scratch()
    d2l.Trainer(max_epochs=1, num_gpus=1).prepare_model(scratch)
    assert scratch.w.ctx == d2l.try_gpu()
"""


@pytest.mark.parametrize("virtual_gpus", [0, 2])
def test_the_books_code_runs(virtual_gpus):
    assert run_book("mxnet", EPOCHS, "trainer.model", virtual_gpus) == expect(virtual_gpus)


@pytest.mark.parametrize(
    ("virtual_gpus", "first", "last"), [(0, "cpu", "cpu"), (2, "gpu:0", "gpu:1")]
)
def test_the_printed_cells_run_with_the_lines_of_the_page(virtual_gpus, first, last):
    assert run_cells("mxnet", "net", virtual_gpus) == [first, last, last, first]


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("mxnet") == [0, []]
