"""The book's code for JAX: docs/d2l.md on the CPU and on virtual GPUs, and the epochs of 3.4."""

import pytest
from book import expect, run_book, run_cells, run_tour

EPOCHS = """
@d2l.add_to_class(d2l.Trainer)
def prepare_model(self, model):
    model.trainer = self
    model.board.xlim = [0, self.max_epochs]
    self.model = model

@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    if self.gpus:
        batch = [d2l.to(a, self.gpus[0]) for a in batch]
    return batch

@d2l.add_to_class(d2l.Trainer)
def fit_epoch(self):
    self.model.training = True
    for batch in self.train_dataloader:
        _, grads = self.model.training_step(
            self.state.params, self.prepare_batch(batch), self.state
        )
        self.state = self.state.apply_gradients(grads=grads)
        self.state = self.state.replace(dropout_rng=jax.random.split(self.state.dropout_rng)[0])
        self.train_batch_idx += 1
    if self.val_dataloader is None:
        return
    self.model.training = False
    for batch in self.val_dataloader:
        self.model.validation_step(self.state.params, self.prepare_batch(batch), self.state)
        self.val_batch_idx += 1
"""


@pytest.mark.parametrize("virtual_gpus", [0, 2])
def test_the_books_code_runs(virtual_gpus):
    assert run_book("jax", EPOCHS, "trainer.state.params", virtual_gpus) == expect(virtual_gpus)


@pytest.mark.parametrize(
    ("virtual_gpus", "first", "last"), [(0, "cpu", "cpu"), (2, "gpu:0", "gpu:1")]
)
def test_the_printed_cells_run_with_the_lines_of_the_page(virtual_gpus, first, last):
    assert run_cells("jax", "params", virtual_gpus) == [first, last, last, first]


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("jax") == [0, []]
