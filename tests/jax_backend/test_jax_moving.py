"""``to`` and ``copy``: one ``device_put`` for all, new memory where it was asked for."""

import jax
import jax.numpy as jnp
import pytest

from d2ldev import cpu, gpu


@pytest.fixture
def puts(monkeypatch):
    """What is given to ``jax.device_put``, call by call."""
    calls = []
    original = jax.device_put

    def counting(x, *arguments, **options):
        calls.append(x)
        return original(x, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", counting)
    return calls


def test_what_is_there_is_put_nowhere(backend, puts):
    x = backend.ones(2, device="gpu:0")
    batch = {"x": x, "y": [x, (x, None)]}
    puts.clear()
    assert backend.to(x, "gpu:0") is x
    assert backend.to(batch, "gpu:0") is batch
    assert puts == []


def test_a_batch_is_put_at_once(backend, puts):
    batch = {"x": backend.ones(2), "y": [backend.zeros(3), (backend.arange(2), "label")]}
    puts.clear()
    moved = backend.to(batch, "gpu:1")
    assert len(puts) == 1
    assert len(jax.tree.leaves(puts)) == 3
    assert moved["y"][1][1] == "label"


def test_a_copy_of_a_batch_is_put_at_once_for_each_device(backend, puts):
    batch = [backend.ones(2, device=place) for place in ("cpu", "gpu:0", "cpu", "gpu:0")]
    puts.clear()
    copied = backend.copy(batch)
    assert len(puts) == 2
    assert [backend.device_of(x) for x in copied] == [cpu(), gpu(0), cpu(), gpu(0)]


@pytest.mark.parametrize("method", ["to", "copy"])
def test_what_was_uncommitted_is_committed_when_it_moves(backend, method):
    assert getattr(backend, method)(jnp.ones(2), "gpu:0").committed


def test_a_copy_where_it_was_is_committed(backend):
    assert backend.copy(jnp.ones(2)).committed


def test_a_converted_array_is_committed_where_it_was(backend):
    x = backend.asarray(backend.ones(2, device="gpu:1"), dtype="int32")
    assert x.committed
    assert backend.device_of(x) is gpu(1)
    assert backend.asarray(jnp.ones(2), dtype="int32").committed


@pytest.mark.parametrize("place", [cpu(), gpu(0)], ids=str)
@pytest.mark.parametrize("target", [None, "same"])
def test_a_copy_outlives_its_source(backend, place, target):
    x = backend.full(2**14, 3.0, device=place)
    copied = backend.copy(x, place if target else None)
    assert backend.address(copied) != backend.address(x)
    x.delete()
    assert backend.to_numpy(copied).max() == 3


def test_a_moved_array_outlives_its_source(backend):
    x = backend.full(2**14, 3.0)
    moved = backend.to(x, "gpu:0")
    assert backend.address(moved) != backend.address(x)
    x.delete()
    assert backend.to_numpy(moved).max() == 3


def test_random_keys_move_and_draw_the_same(backend):
    key = jax.random.key(3)
    moved = backend.to({"key": key}, "gpu:1")["key"]
    x = jax.random.uniform(moved, (3,))
    assert backend.device_of(x) is gpu(1)
    assert x.tolist() == jax.random.uniform(key, (3,)).tolist()


def test_a_copied_key_is_new_memory(backend):
    key = jax.random.key(3)
    copied = backend.copy(key)
    assert backend.address(copied) != backend.address(key)
    assert copied.dtype == key.dtype


def test_random_keys_in_numpy_are_their_numbers(backend):
    key = jax.random.key(3)
    assert backend.to_numpy(key).tolist() == jax.random.key_data(key).tolist()


def test_narrow_integers_move(backend):
    x = jnp.array([1, -2], "int4")
    moved = backend.to(x, "gpu:0")
    assert (moved.dtype, moved.tolist()) == (x.dtype, [1, -2])


def test_jax_s_own_words_may_stand_in_a_batch(backend):
    x = backend.ones(1)
    batch = [x, jnp.float32, x.dtype, backend.native("cpu"), x.sharding]
    moved = backend.to(batch, "gpu:0")
    assert backend.device_of(moved[0]) is gpu(0)
    assert all(after is before for after, before in zip(moved[1:], batch[1:], strict=True))


def test_a_transfer_guard_of_the_user_s_allows_what_was_asked_for(backend):
    x = backend.ones(2)
    with jax.transfer_guard("disallow"):
        assert backend.device_of(backend.to(x, "gpu:0")) is gpu(0)
        assert backend.device_of(backend.copy(x)) is cpu()
