"""``prefetch`` on JAX: all arrays of a batch go in one ``device_put``, which is asynchronous."""

import jax
import numpy as np
import pytest

from d2ldev import gpu


@pytest.fixture
def puts(monkeypatch):
    """How many arrays each ``jax.device_put`` was given, and where they were to go."""
    calls, put = [], jax.device_put

    def counted(x, device=None, **options):
        calls.append((len(jax.tree.leaves(x)), device))
        return put(x, device, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    return calls


def batches_of(backend, form, number=4):
    """Batches of three tensors of the CPU, with their number in them."""
    for each in range(number):
        yield form(
            backend.full((2, 3), float(each)),
            backend.full(2, each, dtype="int32"),
            backend.full((), float(each)),
        )


FORMS = {
    "tuple": lambda *parts: parts,
    "nesting": lambda x, y, z: {"inputs": [x, (z,)], "y": y, "name": "batch"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_is_one_put_of_all_its_arrays(backend, puts, form, depth):
    source = list(batches_of(backend, FORMS[form]))
    puts.clear()
    moved = list(backend.prefetch(source, "gpu:1", depth))
    assert puts == [(3, backend.native("gpu:1"))] * 4
    for batch, expected in zip(moved, source, strict=True):
        leaves = jax.tree.leaves(batch)
        for x, y in zip(leaves, jax.tree.leaves(expected), strict=True):
            assert np.array_equal(x, y)
        devices = {backend.device_of(x) for x in leaves if not isinstance(x, str)}
        assert devices == {gpu(1)}


def test_the_next_batches_are_put_before_the_one_in_use_is_handed_over(backend, puts):
    source = list(batches_of(backend, FORMS["tuple"]))
    puts.clear()
    asked = [len(puts) for _ in backend.prefetch(source, "gpu:0", 2)]
    assert asked == [3, 4, 4, 4]


def test_arrays_of_numpy_go_to_a_real_gpu_together(backend, puts, monkeypatch):
    """By way of the host's memory, into which they are copied one by one."""
    monkeypatch.setattr(backend, "_platform", lambda device: "cuda")
    source = [(np.full((2, 3), each, "float32"), np.full(2, each, "int32")) for each in range(4)]
    moved = list(backend.prefetch(source, "gpu:1"))
    gpu_of_jax = backend.native("gpu:1")
    assert [count for count, device in puts if device == gpu_of_jax] == [2] * 4
    for batch, expected in zip(moved, source, strict=True):
        for x, array in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(x), array)


def test_nothing_is_put_that_is_there(backend, puts):
    source = [backend.to(batch, "gpu:0") for batch in batches_of(backend, FORMS["tuple"])]
    puts.clear()
    moved = list(backend.prefetch(source, "gpu:0"))
    assert puts == []
    assert all(x is y for x, y in zip(moved, source, strict=True))


def test_nothing_is_waited_for(backend, monkeypatch):
    source = list(batches_of(backend, FORMS["tuple"]))

    def refused(*args):
        raise AssertionError("it waits for the device")

    array = type(source[0][0])
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", refused)
        patch.setattr(backend, "_to_numpy", refused)
        for name in ("block_until_ready", "_value"):
            patch.setattr(array, name, property(refused))
        moved = list(backend.prefetch(source, "gpu:0"))
        with pytest.raises(AssertionError, match="waits"):
            float(moved[0][2])
    assert [float(backend.to_numpy(z)) for *_, z in moved] == [0.0, 1.0, 2.0, 3.0]
