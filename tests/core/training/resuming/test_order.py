"""A resumed run's batches come in the order in which they would have come, whatever the loader."""

import random

import numpy as np
import pytest

import d2ldev
from d2ldev import CheckpointError, Trainer
from d2ldev.distributed.random_states import check_random_state, random_state
from d2ldev.training.order import Order

EPOCHS = 4
X = np.arange(6, dtype="float32").reshape(6, 1)


class OfPython:
    """Data in an order that is drawn as ``data_iter`` of D2L, section 3.4, draws it."""

    def __iter__(self):
        order = list(range(6))
        random.shuffle(order)
        return ((X[[i]], X[[i]]) for i in order)


class OfNumPy:
    def __iter__(self):
        return ((X[[i]], X[[i]]) for i in np.random.permutation(6))


def loader_of_arrays():
    return d2ldev.ArrayLoader(X, X, batch_size=1, shuffle=True, seed=2)


def loader_without_seed():
    return d2ldev.ArrayLoader(X, X, batch_size=1, shuffle=True, seed=None)


MAKERS = [loader_of_arrays, OfPython, OfNumPy]


@pytest.fixture(autouse=True)
def _random_numbers_are_left_alone():
    states = random.getstate(), np.random.get_state()
    random.seed(5)
    np.random.seed(5)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


class EndedError(Exception):
    """Ends a run in a batch."""


class Recording(Trainer):
    """A trainer that notes its batches, and ends in one of them."""

    def __init__(self, epochs, backend, ends_in=None):
        super().__init__(epochs, backend=backend)
        self.seen, self.ends_in = [], ends_in

    def prepare_batch(self, batch):
        if len(self.seen) == self.ends_in:
            raise EndedError
        self.seen.append(float(batch[0][0, 0]))
        return super().prepare_batch(batch)


def run(backend, data, path, *, epochs=EPOCHS, ends_in=None, **options):
    trainer = Recording(epochs, backend, ends_in)
    try:
        trainer.fit(backend.mlp([1, 1]), data, lr=1e-3, checkpoint=path, **options)
    except EndedError:
        trainer.seen = trainer.seen[: -(ends_in % 6) or None]
    return trainer.seen


@pytest.mark.parametrize("make", [*MAKERS, loader_without_seed])
def test_the_order_goes_on_in_another_process(reference, tmp_path, make):
    """With a loader that is made anew, and random numbers that begin anew."""
    first = make()
    before = run(reference, first, tmp_path / "run", epochs=2)
    rest = run(reference, first, None, epochs=2)  # what an unbroken run goes on with
    random.seed(5)
    np.random.seed(5)
    assert run(reference, make(), tmp_path / "run", resume=True) == rest
    assert before[:6] != before[6:]
    assert before[6:] != rest[:6]


@pytest.mark.parametrize("ends_in", [3, 9, 12])
@pytest.mark.parametrize("make", MAKERS)
def test_a_run_that_ends_within_an_epoch_begins_it_again(reference, tmp_path, make, ends_in):
    unbroken = run(reference, make(), tmp_path / "unbroken")
    random.seed(5)
    np.random.seed(5)
    seen = run(reference, make(), tmp_path / "run", ends_in=ends_in)
    random.seed(6)
    np.random.seed(6)
    seen += run(reference, make(), tmp_path / "run", resume=True)
    assert seen == unbroken


def test_a_loader_with_a_state_may_be_used_again_by_the_run_that_goes_on(reference, tmp_path):
    unbroken = run(reference, loader_of_arrays(), tmp_path / "unbroken")
    data = loader_of_arrays()
    for ends_in in (3, 9):
        run(reference, data, tmp_path / "run", ends_in=ends_in, resume=True)
    assert run(reference, data, tmp_path / "run", resume=True) == unbroken[6:]


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64", "MT19937"])
def test_every_generator_of_numpys_own_goes_on(kind):
    """As ``np.random.set_bit_generator`` sets it, with numbers of more than 64 bits."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(3))
        np.random.normal()  # of which there are two: one is kept
        state = random_state()
        expected = np.random.normal(size=4).tolist()
        check_random_state(state)()
        assert np.random.normal(size=4).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_state_of_another_generator_of_numpys_is_refused():
    state, before = random_state(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(CheckpointError, match="not a state of the generators of Python"):
            check_random_state(state)
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("make", [loader_of_arrays, lambda: [(X, X)]])
@pytest.mark.parametrize(
    "state", [None, 3, {}, {"kind": "nothing"}, {"kind": 1, "state": 2, "random": 3}]
)
def test_an_invalid_state_is_refused(make, state):
    with pytest.raises(CheckpointError, match="restore the order of the data"):
        Order(make()).check(state)


@pytest.mark.parametrize("part", ["python", "numpy"])
@pytest.mark.parametrize("value", [None, {}, 3, "x", {"version": 3, "numbers": "00"}])
def test_an_invalid_state_of_random_numbers_is_refused(part, value):
    order = Order([(X, X)])
    state = order.state()
    state["random"][part] = value
    with pytest.raises(CheckpointError, match="random numbers"):
        order.check(state)


@pytest.mark.parametrize("position", [-1, 625, 10**9, 2**70])
def test_a_position_outside_of_numpys_numbers_is_refused(position):
    """NumPy would take it, and read there."""
    state = random_state()
    state["numpy"]["state"]["pos"] = position
    with pytest.raises(CheckpointError, match="random numbers"):
        check_random_state(state)


def test_an_invalid_state_of_pythons_generator_is_refused():
    state = random_state()
    state["python"][2] = "x"
    with pytest.raises(CheckpointError, match="random numbers"):
        check_random_state(state)


def test_to_check_a_state_changes_nothing():
    data = loader_of_arrays()
    state = {**Order(data).state(), "state": {"seed": 7, "epoch": 2}}
    random.random()
    before = random.getstate()
    Order(data).check(state)
    assert (data.state_dict()["epoch"], random.getstate()) == (0, before)


def test_a_checkpoint_that_cannot_be_written_is_found_out_before_the_first_batch(
    reference, tmp_path
):
    trainer = Recording(1, reference)
    with pytest.raises(CheckpointError):
        trainer.fit(reference.mlp([1, 1]), [(X, X)], checkpoint=tmp_path / "no" / "folder")
    assert trainer.seen == []
