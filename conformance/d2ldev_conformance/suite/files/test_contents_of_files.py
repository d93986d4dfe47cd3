"""D2L 6.6, "File I/O": what an object keeps is in its file, as the object itself shows.

A file that lacks one kind of tensor loads without an error, and the model is another one. The
object itself is asked, and not a list of the backend.
"""

from __future__ import annotations

import pytest

from d2ldev import CheckpointError
from d2ldev_conformance.provision import buffers, optimizer_states, parameter_orders, views
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, read_contents

SECTION = "6.6"
SOURCE = "contract, Files"


def check_file(backend, place, contents, path):
    """Check that a file brings tensors of an object to another one, whose values are others."""
    build, list_tensors = contents
    first, second = build(1, place), build(2, place)
    saved, others = (read_contents(backend, list_tensors(obj)) for obj in (first, second))
    for value, other in zip(saved, others, strict=True):
        assert value.tobytes() != other.tobytes()
    backend.save(first, path)
    loaded = list_tensors(backend.load_into(second, path))
    assert [backend.device_of(x) for x in loaded] == [place] * len(saved)
    for x, value in zip(loaded, saved, strict=True):
        assert_same(backend.to_numpy(x), value)


@requirement("io.keeps-buffers", section=SECTION)
def test_what_a_model_does_not_train_is_saved(backend, place, buffered, tmp_path):
    """Save and load the buffers of a model, such as running means."""
    check_file(backend, place, buffers(backend)[buffered], tmp_path / "saved")


@requirement("io.keeps-states-of-optimizers", section=SECTION)
def test_the_state_of_an_optimizer_is_saved(backend, place, optimized, tmp_path):
    """Save and load the state of each optimizer."""
    check_file(backend, place, optimizer_states(backend)[optimized], tmp_path / "saved")


def read_states(backend, read, obj):
    """Return the state of each parameter as NumPy arrays."""
    return {name: [backend.to_numpy(x).tolist() for x in xs] for name, xs in read(obj).items()}


@requirement("io.matches-states-by-name", section=SECTION)
def test_the_state_of_an_optimizer_belongs_to_the_name_of_a_parameter(
    backend, place, parameter_order, tmp_path
):
    """Read the state of an optimizer by the names of its parameters, and not by their order.

    Otherwise a parameter takes over the means of another one of its shape, and no error says so.
    """
    build, read = parameter_orders(backend)[parameter_order]
    first, second = build("ac", 1, place), build("ca", 2, place)
    expected = read_states(backend, read, first)
    assert expected["a"] != expected["c"]
    backend.save(first, tmp_path / "saved")
    loaded = backend.load_into(second, tmp_path / "saved")
    assert read_states(backend, read, loaded) == expected


@requirement("io.matches-states-by-name", section=SECTION)
@pytest.mark.parametrize(("saved", "given"), [("a", "ac"), ("ac", "a"), ("a", "c")])
def test_the_state_of_an_optimizer_of_other_parameters_is_refused(
    backend, parameter_order, tmp_path, saved, given
):
    """Refuse the state of an optimizer that trains other parameters, and change nothing."""
    build, read = parameter_orders(backend)[parameter_order]
    first, second = build(saved, 1, backend.cpu()), build(given, 2, backend.cpu())
    expected = read_states(backend, read, second)
    backend.save(first, tmp_path / "saved")
    with pytest.raises(CheckpointError):
        backend.load_into(second, tmp_path / "saved")
    assert read_states(backend, read, second) == expected


@requirement("io.load-into-writes-in-place", section=SECTION)
def test_another_holder_of_the_memory_of_a_model_sees_what_is_loaded(
    backend, place, viewed, tmp_path
):
    """Write into the memory of a model, where the framework's memory can be written.

    A process with which a model is shared, or a buffer of all weights, would keep the old values.
    """
    build, list_views = views(backend)[viewed]
    first, second = build(1, place), build(2, place)
    saved, held = read_contents(backend, list_views(first)), list_views(second)
    for value, x in zip(saved, held, strict=True):
        assert value.tobytes() != backend.to_numpy(x).tobytes()
    backend.save(first, tmp_path / "saved")
    backend.load_into(second, tmp_path / "saved")
    for x, value in zip(held, saved, strict=True):
        assert_same(backend.to_numpy(x), value)


@requirement("io.load-into-writes-in-place", section=SECTION)
def test_a_file_whose_last_bit_is_damaged_writes_nothing(backend, place, viewed, tmp_path):
    """Write nothing before the checksums of all tensors are compared.

    Half of a model would be of the file.
    """
    build, list_views = views(backend)[viewed]
    first, second = build(1, place), build(2, place)
    held = list_views(second)
    before = read_contents(backend, held)
    backend.save(first, tmp_path / "saved")
    data = bytearray((tmp_path / "saved").read_bytes())
    data[-1] ^= 1
    (tmp_path / "saved").write_bytes(data)
    with pytest.raises(CheckpointError):
        backend.load_into(second, tmp_path / "saved")
    for x, value in zip(held, before, strict=True):
        assert_same(backend.to_numpy(x), value)
