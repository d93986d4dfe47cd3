"""The state of a learner whose layers were frozen and thawed: slots that came later are in it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from freezing import OPTIMIZERS, batch_for, freeze, learner_of, losses, network, optimizers

from d2ldev import CheckpointError, OutOfDeviceMemoryError, gpu


@pytest.fixture
def batch(backend):
    return batch_for(backend)


@optimizers
def test_slots_that_come_later_are_in_the_order_of_those_made_at_once(backend, batch, make):
    net, late, at_once = network(backend, [0, 1]), make(), make()
    learner = learner_of(backend, net, late)
    losses(learner, batch, 1)
    freeze(net, [])
    losses(learner, batch, 1)
    at_once.build([*late._trainable_variables])

    def names(optimizer):
        return [v.name for v in optimizer.variables if "variable" not in v.name]

    assert names(late) == names(at_once)


@optimizers
@pytest.mark.parametrize("frozen", [[], [2]], ids=["thawed", "thawed, and others frozen"])
def test_a_run_that_has_thawed_goes_on_from_its_state(backend, batch, make, frozen):
    net = network(backend, [0, 1])
    first, resumed = learner_of(backend, net, make()), network(backend, [0, 1])
    second = learner_of(backend, resumed, make())
    losses(first, batch, 2)
    freeze(net, frozen)
    losses(first, batch, 2)
    second.restore(first.state())
    assert [layer.trainable for layer in resumed.layers] == [x.trainable for x in net.layers]
    assert losses(second, batch, 3) == losses(first, batch, 3)
    tf.nest.map_structure(np.testing.assert_array_equal, second.state(), first.state())


def test_a_learner_goes_back_to_a_state_from_before_it_was_thawed(backend, batch):
    net = network(backend, [0, 1])
    learner = learner_of(backend, net, "adam")
    losses(learner, batch, 2)
    state = learner.state()
    expected = losses(learner, batch, 2)
    freeze(net, [])
    losses(learner, batch, 2)
    learner.restore(state)
    assert losses(learner, batch, 2) == expected


def test_a_state_from_before_the_slots_of_what_was_thawed_were_made(backend, batch):
    net = network(backend, [0, 1])
    learner = learner_of(backend, net, "adam")
    losses(learner, batch, 2)
    freeze(net, [])
    state = learner.state()
    expected = losses(learner, batch, 2)
    learner.restore(state)
    assert losses(learner, batch, 2) == expected


def _change(state, **changes):
    state["optimizer"] = state["optimizer"] | changes


BROKEN = {
    "for no variable of the model": lambda state: _change(state, trained=[0, 1, 99, 3]),
    "for one of them twice": lambda state: _change(state, trained=[0, 1, 2, 2]),
    "for what is no number": lambda state: _change(state, trained=["kernel"]),
    "for variables of other shapes": lambda state: _change(state, trained=[0, 1, 2, 6]),
    "for none": lambda state: _change(state, trained=None),
    "of what is no flag": lambda state: state.update(trainable=["yes"] * 12),
    "of what is no tensor": lambda state: _change(state, variables=[np.array([{}])]),
    "of other layers": lambda state: state.update(trainable=[True]),
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_a_state_with_other_slots_is_refused_and_nothing_has_changed(backend, batch, break_it):
    net = network(backend, [0, 1])
    first, second = learner_of(backend, net, "adam"), learner_of(backend, network(backend), "adam")
    losses(first, batch, 2)
    freeze(net, [])
    losses(first, batch, 2)
    state = first.state()
    break_it(state)
    before, ids = second.state(), [id(v) for v in second.parts["optimizer"].variables]
    with pytest.raises(CheckpointError):
        second.restore(state)
    assert [id(v) for v in second.parts["optimizer"].variables] == ids
    tf.nest.map_structure(np.testing.assert_array_equal, second.state(), before)
    losses(second, batch, 1)


def test_a_state_that_finds_no_memory_changes_nothing(backend, batch, monkeypatch):
    net = network(backend, [0, 1])
    first, second = learner_of(backend, net, "adam"), learner_of(backend, network(backend), "adam")
    losses(first, batch, 2)
    freeze(net, [])
    losses(first, batch, 2)
    state, before = first.state(), second.state()
    ids = [id(v) for v in second.parts["optimizer"].variables]

    def asarray(*arguments, **options):
        raise OutOfDeviceMemoryError("put tensors on gpu(1)", "it is full", "use a smaller model")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "asarray", asarray)
        with pytest.raises(OutOfDeviceMemoryError):
            second.restore(state)
    assert [id(v) for v in second.parts["optimizer"].variables] == ids
    tf.nest.map_structure(np.testing.assert_array_equal, second.state(), before)


def test_an_optimizer_that_was_thawed_is_saved_as_a_checkpoint_of_tensorflows(
    backend, batch, tmp_path
):
    def saved(frozen, name):
        net, optimizer = network(backend, frozen), keras.optimizers.Adam(0.1)
        learner = learner_of(backend, net, optimizer)
        losses(learner, batch, 1)
        freeze(net, [])
        losses(learner, batch, 1)
        path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / name))
        return set(tf.train.load_checkpoint(path).get_variable_to_shape_map())

    assert saved([0, 1], "thawed") == saved([], "built at once")


def test_what_an_optimizer_does_not_list_is_placed_and_part_of_the_state(backend, batch):
    """Keras does not list the product of a Nadam that another optimizer has built."""
    net, optimizer = network(backend), OPTIMIZERS["scaling"]()
    learner = learner_of(backend, net, optimizer)
    state = learner.state()
    expected = losses(learner, batch, 3)
    product = optimizer.inner_optimizer._u_product
    assert backend.device_of(product.value) is gpu(1)
    learner.restore(state)
    assert float(product) == 1
    assert losses(learner, batch, 3) == expected
