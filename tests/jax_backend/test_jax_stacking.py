"""Many scalars in few programs; what is only traced is no scalar to log."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax import stacking
from d2ldev_jax.stacking import stack

from d2ldev import DeviceLog, UnsupportedValueError

# Before JAX is asked for an array: it makes its devices then.
pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("number", [1, 2, 31, 32, 33, 1024, 1025])
def test_any_number_of_scalars_is_stacked_in_its_order(number):
    xs = [jnp.float32(i) for i in range(number)]
    assert np.asarray(stack(xs)).tolist() == list(range(number))


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 3), (32,)], ids=str)
def test_arrays_of_any_shape_are_stacked(shape):
    stacked = stack([jnp.full(shape, i) for i in range(40)])
    assert stacked.shape == (40, *shape)
    assert np.array_equal(stacked, np.stack([np.full(shape, i) for i in range(40)]))


def test_the_dtype_stays():
    assert stack([jnp.bfloat16(1), jnp.bfloat16(2)]).dtype == jnp.bfloat16


def test_the_device_stays(backend):
    xs = [backend.full((), 1.0, device="gpu:1") for _ in range(40)]
    assert str(backend.device_of(stack(xs))) == "gpu:1"


def test_another_number_of_scalars_needs_no_other_program():
    xs = [jnp.int8(1)] * 600
    stack(xs[:100])
    programs = stacking._grouped._cache_size()
    stack(xs[:500]), stack(xs)
    assert stacking._grouped._cache_size() == programs


def test_a_traced_scalar_is_refused_with_what_to_do(backend):
    log = DeviceLog(backend)

    @jax.jit
    def step(x):
        log.add(loss=x.sum())
        return x

    with pytest.raises(UnsupportedValueError, match="log loss") as caught:
        step(jnp.ones(2))
    assert caught.value.fix == "return loss from what is compiled, and log what it returns"
    assert log.flush() == {}


def test_to_a_real_gpu_a_batch_is_moved_in_one_call(backend, monkeypatch):
    monkeypatch.setattr(backend, "_platform", lambda device: "cuda")
    calls, put = [], jax.device_put

    def counting(x, *given, **named):
        calls.append(given[0])
        return put(x, *given, **named)

    monkeypatch.setattr(jax, "device_put", counting)
    x, y = np.ones((2, 3), "float32"), np.ones(2, "int32")
    list(backend.prefetch([{"x": x, "y": (y, y)}], "gpu:1"))
    assert calls.count(backend.native("gpu:1")) == 1
