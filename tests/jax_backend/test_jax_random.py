"""Random numbers: seeds of any size, and draws without one from a state of the backend's own."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from d2ldev_jax.draws import Draws

SEEDS = [0, 1, -1, -2, 2**31, 2**32, 2**32 + 1, 2**40, -(2**40), 2**63, 2**64, 2**100]


def test_a_small_seed_is_jax_s_own(backend):
    x = backend.rand(3, seed=7, device="gpu:1")
    assert x.tolist() == jax.random.uniform(jax.random.key(7), (3,)).tolist()


def test_seeds_of_any_size_give_numbers_of_their_own(backend):
    drawn = {tuple(backend.rand(4, seed=seed).tolist()) for seed in SEEDS}
    assert len(drawn) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_any_size_repeats(backend, seed):
    assert backend.rand(4, seed=seed).tolist() == backend.rand(4, seed=seed).tolist()


def test_a_seed_gives_the_same_on_every_device(backend):
    drawn = {tuple(backend.randn(4, seed=3, device=place).tolist()) for place in backend.devices()}
    assert len(drawn) == 1


def test_threads_draw_different_numbers(backend):
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: tuple(backend.rand(4).tolist()), range(64)))
    assert len(set(drawn)) == 64


def test_a_seed_does_not_disturb_what_comes_without(monkeypatch):
    monkeypatch.setattr("os.urandom", lambda size: b"1234"[:size])
    native = jax.devices()[0]
    one, other = Draws(), Draws()
    one.key(5, native)
    keys = [jax.random.key_data(draws.key(None, native)).tolist() for draws in (one, other)]
    assert keys[0] == keys[1]


def test_two_processes_do_not_draw_the_same():
    native = jax.devices()[0]
    keys = [jax.random.key_data(Draws().key(None, native)).tolist() for _ in range(2)]
    assert keys[0] != keys[1]
