"""D2L 6.7.2.1, "Storage on the GPU", for random numbers: with a seed and without.

An experiment can only be repeated if its seed is all that it depends on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from d2ldev import UnsupportedValueError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same

SECTION = "6.7.2.1"
SOURCE = "contract, Random numbers"


@requirement("create.rand-is-uniform", section=SECTION, source="NumPy, random sampling")
def test_rand_is_uniform_from_zero_to_one(backend, place):
    """Draw ``rand`` uniformly from 0 up to and without 1, in dtypes of few bits, too.

    A number just below 1 becomes 1 where it is rounded to such a dtype, and its logarithm 0.
    """
    narrow = [name for name in ("float16", "bfloat16") if name in backend.dtype_names]
    for dtype in ("float32", *narrow):
        drawn = backend.rand((200, 200), dtype=dtype, seed=0, device=place)
        x = backend.to_numpy(drawn).astype("float64")
        assert x.min() >= 0
        assert x.max() < 1
        assert abs(x.mean() - 1 / 2) < 0.02
        assert abs(x.var() - 1 / 12) < 0.01


@requirement("create.randn-is-normal", section=SECTION, source="NumPy, random sampling")
def test_randn_is_normal(backend, place):
    """Draw ``randn`` from the standard normal distribution."""
    x = backend.to_numpy(backend.randn((100, 100), seed=0, device=place))
    assert abs(x.mean()) < 0.05
    assert abs(x.std() - 1) < 0.05
    assert x.min() < -2
    assert x.max() > 2


@requirement("create.seeds-repeat", section=SECTION)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_the_same_seed_gives_the_same_numbers(backend, place, name):
    """Draw the same numbers for one seed on one device, at each call."""
    draw = getattr(backend, name)
    first, second = (backend.to_numpy(draw((4, 4), seed=3, device=place)) for _ in range(2))
    assert_same(first, second)


@requirement("create.seeds-differ", section=SECTION)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_other_seeds_and_no_seed_give_other_numbers(backend, place, name):
    """Draw other numbers for another seed, and for each call without one.

    A constant result would pass as repeatable.
    """
    draw = getattr(backend, name)
    drawn = [draw((4, 4), seed=seed, device=place) for seed in (3, 4, None, None)]
    assert len({backend.to_numpy(x).tobytes() for x in drawn}) == 4


@requirement("create.seeds-everything", section=SECTION)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_the_same_global_seed_gives_the_same_numbers(backend, place, name):
    """Repeat the numbers of ``rand`` and ``randn`` after ``backend.seed(n)``.

    Calls without a seed of their own follow the global one.
    """
    draw, drawn = getattr(backend, name), []
    for seed in (2**32 - 1, 5, 2**32 - 1):
        backend.seed(seed)
        drawn.append([backend.to_numpy(draw((4, 4), device=place)) for _ in range(2)])
    for first, again in zip(drawn[0], drawn[2], strict=True):
        assert_same(first, again)
    assert len({x.tobytes() for each in drawn for x in each}) == 4


@requirement("create.seeds-every-thread", section=SECTION)
@pytest.mark.needs("seed other threads")
def test_the_global_seed_is_that_of_every_thread(backend, place):
    """Repeat the numbers of a thread after ``backend.seed(n)`` in another one.

    Loaders and servers draw in threads of their own, and begin some after the seed.

    One thread has drawn before, so that it has a random state of its own if there is one.
    """

    def draw():
        return backend.to_numpy(backend.rand((4, 4), device=place))

    drawn = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(draw).result()
        for seed in (7, 5, 7):
            backend.seed(seed)
            with ThreadPoolExecutor(1) as later:
                drawn.append([each.submit(draw).result() for each in (pool, later)])
    for first, other, again in zip(*drawn, strict=True):
        assert_same(first, again)
        assert first.tobytes() != other.tobytes()


@requirement("create.bad-global-seeds", section=SECTION)
@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, "x", None, True])
def test_an_invalid_global_seed_is_refused(backend, seed):
    """Refuse a global seed that is not an integer from 0 below 2**32.

    Frameworks accept other ranges, and cut the rest off.
    """
    with pytest.raises(UnsupportedValueError, match=r"backend\.seed\("):
        backend.seed(seed)


@requirement("create.bad-seeds", section=SECTION)
def test_a_seed_is_an_integer(backend):
    """Refuse a seed of ``rand`` that is not an integer.

    A hash of a text differs from process to process.
    """
    with pytest.raises(UnsupportedValueError, match="seed 'x'"):
        backend.rand(2, seed="x")


@requirement("create.random-integers", section=SECTION)
def test_random_numbers_are_of_a_floating_dtype(backend):
    """Refuse to draw normal numbers in a dtype that is not a float.

    Rounded normal numbers are all 0 or 1.
    """
    with pytest.raises(UnsupportedValueError):
        backend.randn(2, dtype="bool")


@requirement("create.seeds-are-taken-whole", section=SECTION)
def test_seeds_that_are_alike_in_their_last_bits_give_other_numbers(backend, place):
    """Draw other numbers for seeds that agree in their last 8, 16 or 24 bits.

    A generator may use a part of the seed only.
    """
    drawn = [backend.rand((4, 4), seed=3 + more, device=place) for more in (0, 2**8, 2**16, 2**24)]
    assert len({backend.to_numpy(x).tobytes() for x in drawn}) == 4


@requirement("create.seeds-are-taken-whole", section=SECTION)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_no_two_seeds_are_one_by_a_remainder(backend, place, name):
    """Draw other numbers for each of many seeds, whatever divides their difference.

    A seed taken modulo 1000 repeats experiments without a sign.
    """
    # Their differences are all numbers up to 4096, so that two have the same remainder by each.
    seeds = {*range(64), *range(0, 4097, 64), 10_000, 2**16, 10**6, 2**24, 10**9, 2**31 - 1}
    draw = getattr(backend, name)
    drawn = {backend.to_numpy(draw((4,), seed=seed, device=place)).tobytes() for seed in seeds}
    assert len(drawn) == len(seeds)


@requirement("create.seeds-leave-the-random-state", section=SECTION)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_a_seed_leaves_the_frameworks_random_state_alone(backend, place, name):
    """Leave the framework's own random numbers alone in a call with a seed.

    Otherwise a library would repeat its caller's random numbers.
    """

    def without_a_seed_after_one():
        getattr(backend, name)((4, 4), seed=3, device=place)
        return backend.to_numpy(backend.rand((4, 4), device=place)).tobytes()

    assert without_a_seed_after_one() != without_a_seed_after_one()
