"""D2L 6.6, "File I/O": models that were trained are saved and loaded.

A model after training holds more than before: gradients, and shapes that came with the first batch.
"""

from __future__ import annotations

import pytest

from d2ldev import CheckpointError, Trainer
from d2ldev_conformance.provision import networks
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, assert_saved, flip_bits, read_saved_values

SECTION = "6.6"
SOURCE = "contract, Files"


@pytest.fixture
def path(tmp_path):
    """A path where no file is yet, in a folder of its own."""
    return tmp_path / "saved.safetensors"


@requirement("io.gradients-are-not-saved", section=SECTION)
def test_a_model_that_was_trained_is_saved_without_its_gradients(backend, path, place):
    """Save a trained model without its gradients.

    They double the file, and no one reads them.
    """
    learner = backend.learner(backend.mlp([2, 1], device=place))
    learner.step((backend.ones((4, 2), device=place),), backend.ones((4, 1), device=place))
    backend.save(learner.sync()["model"], path)
    saved = [backend.to_numpy(x) for x in backend.load(path).values()]
    assert sorted(value.size for value in saved) == [1, 2]


def _train(backend, place):
    """Return a network on a device, after a step of training."""
    learner = backend.learner(backend.mlp([2, 1], device=place, seed=1))
    learner.step((backend.ones((4, 2), device=place),), backend.ones((4, 1), device=place))
    return learner.sync()["model"]


@requirement("io.named-tensors-are-what-is-saved", section=SECTION)
def test_the_named_tensors_of_a_trained_model_can_be_saved_and_loaded_into_one(
    backend, path, place
):
    """Save the ``named_tensors`` of a model as a file that loads into a model."""
    net, other = _train(backend, place), backend.mlp([2, 1], device=place, seed=2)
    backend.save(backend.named_tensors(net), path)
    assert_saved(backend, backend.load_into(other, path), read_saved_values(backend, net))


@requirement("io.load-into-takes-tensors-by-name", section=SECTION)
def test_load_into_takes_the_tensors_of_another_model(backend, place):
    """Take another model's tensors by name, as copies, on the model's own device.

    An average of models is made in memory.
    """
    net, other = _train(backend, "cpu"), backend.mlp([2, 1], device=place, seed=2)
    loaded = backend.load_into(other, backend.named_tensors(net))
    assert_saved(backend, loaded, read_saved_values(backend, net))
    assert set(backend.placement(loaded).values()) == {place}
    theirs = {backend.address(x) for x in backend.named_tensors(net).values()}
    assert not theirs & {backend.address(x) for x in backend.named_tensors(loaded).values()}


@requirement("io.load-into-takes-tensors-by-name", section=SECTION)
def test_load_into_writes_one_parameter(backend, place):
    """Write one parameter by its name, and leave the others.

    Surgery on a layer needs no file.
    """
    net = _train(backend, place)
    values = read_saved_values(backend, net)
    name = next(iter(values))
    values[name] = flip_bits(values[name])
    net = backend.load_into(net, {**backend.named_tensors(net), name: values[name]})
    assert_saved(backend, net, values)
    assert set(backend.placement(net).values()) == {place}


@requirement("io.load-into-gives-shapes", section=SECTION)
def test_a_network_that_waits_for_its_first_batch_gets_shapes_and_values_from_the_file(
    backend, path, place, network
):
    """Give shapes and values to a network that waits for its first batch."""
    build = networks(backend)[network]
    learner = backend.learner(build(backend.cpu()), loss="cross_entropy")
    learner.step((backend.rand((5, 4), seed=0),), backend.zeros(5, dtype="int32"))
    backend.save(learner.sync()["model"], path)
    loaded = backend.load_into(build(place), path)
    found = read_saved_values(backend, loaded)
    wanted = read_saved_values(backend, learner.sync()["model"])
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert_same(found[name], value)
    assert set(backend.placement(loaded).values()) == {place}


@requirement("io.load-into-reads-one-part", section=SECTION)
def test_the_model_of_a_run_s_checkpoint_is_read_alone(backend, path, place):
    """Read the model of a run's checkpoint alone, with ``only=``.

    A program that only predicts has no use for the optimizer.
    """
    trainer = Trainer(1, backend=backend)
    batches = [(backend.ones((2, 3)), backend.ones((2, 1)))]
    trainer.fit(backend.mlp([3, 4, 1], seed=1), batches, checkpoint=path)
    other = backend.mlp([3, 4, 1], seed=2, device=place)
    loaded = backend.load_into(other, path, only="components.model")
    found, wanted = read_saved_values(backend, loaded), read_saved_values(backend, trainer.model)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert_same(found[name], value)
    assert set(backend.placement(loaded).values()) == {place}


@requirement("io.load-into-reads-one-part", section=SECTION)
def test_a_missing_part_is_refused_with_the_nearest_name(backend, path):
    """Refuse a missing part, and suggest the nearest name.

    A part's name is typed by hand.
    """
    backend.save({"components": {"model": [backend.ones(3)]}}, path)
    x = [backend.zeros(3)]
    with pytest.raises(CheckpointError, match=r"only='components\.model'"):
        backend.load_into(x, path, only="components.modle")
    assert backend.to_numpy(x[0]).tolist() == [0, 0, 0]
