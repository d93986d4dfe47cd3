"""Files: JAX's arrays, modules, optimizers and random keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from d2ldev_jax import provision
from flax import linen, nnx
from safetensors.numpy import save_file
from saved_files import bits

from d2ldev import CheckpointError, D2LDevWarning
from d2ldev.framework.testing import framework_of


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_comes_back_also_where_jax_has_wide_ones(backend, path, configure, shape):
    configure("jax_enable_x64", True)
    size = int(np.prod(shape))
    saved = {}
    for name in backend.dtype_names:
        dtype = backend.dtype(name)
        data = np.arange(size * dtype.itemsize) % (2 if name == "bool" else 256)
        saved[name] = jnp.asarray(data.astype("uint8").view(dtype).reshape(shape))
    backend.save(saved, path)
    loaded = backend.load(path)
    assert [bits(backend, x) for x in loaded.values()] == [bits(backend, x) for x in saved.values()]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", 2**31), ("int64", -(2**31) - 1), ("uint64", 2**63), ("float64", 1)],
)
def test_a_dtype_that_jax_has_only_when_asked_is_refused_and_not_made_narrow(
    backend, path, configure, dtype, value
):
    configure("jax_enable_x64", True)
    backend.save(jnp.full(3, value, dtype), path)
    configure("jax_enable_x64", False)
    with pytest.raises(CheckpointError, match=dtype):
        backend.load(path)


@pytest.mark.parametrize(("dtype", "value"), [("int64", -(2**31)), ("uint64", 2**32 - 1)])
def test_integers_of_such_a_dtype_are_read_with_a_warning_if_they_fit(
    backend, path, configure, dtype, value
):
    configure("jax_enable_x64", True)
    backend.save(jnp.full(3, value, dtype), path)
    configure("jax_enable_x64", False)
    with pytest.warns(D2LDevWarning, match=dtype):
        loaded = backend.load(path)
    assert backend.to_numpy(loaded).tolist() == [value] * 3


def test_an_array_of_the_cpu_is_written_from_its_own_memory(backend):
    x = backend.zeros(64)
    assert framework_of(backend).files.borrow(x).ctypes.data == backend.address(x)


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back_as_keys_and_draw_the_same(backend, path, generator):
    keys = {"key": jax.random.key(3, impl=generator)}
    keys["split"] = jax.random.split(keys["key"], 4)
    backend.save(keys, path)
    loaded = backend.load(path, device="gpu:1")
    assert [x.dtype for x in loaded.values()] == [x.dtype for x in keys.values()]
    assert str(backend.device_of(loaded["split"])) == "gpu:1"
    drawn = [np.asarray(jax.random.normal(each["split"][2], (3,))) for each in (keys, loaded)]
    np.testing.assert_array_equal(*drawn)


def test_load_into_keeps_the_ties_of_a_module(backend, path):
    begin, _ = provision.loops(backend)["module"]
    backend.save(begin(1, backend.cpu()), path)
    net = backend.load_into(begin(2, backend.gpu(1)), path)["net"]
    assert net.same is net.head.kernel


def test_an_average_that_begins_as_the_parameters_themselves_is_read_apart(backend, path):
    backend.save({"params": {"w": jnp.ones(3)}, "average": {"w": jnp.zeros(3)}}, path)
    begun = {"w": jnp.full(3, 5.0)}
    loaded = backend.load_into({"params": begun, "average": dict(begun)}, path)
    assert (loaded["params"]["w"].tolist(), loaded["average"]["w"].tolist()) == ([1] * 3, [0] * 3)


def test_an_array_that_is_missing_is_not_taken_from_where_it_also_stands(backend, path):
    save_file({"params": np.ones(3, "float32")}, path)
    w = jnp.zeros(3)
    with pytest.raises(CheckpointError, match="it lacks average"):
        backend.load_into({"params": w, "average": w}, path)


def lbfgs(params, steps):
    """Return parameters after some steps, and the state of the optimizer."""
    optimizer = optax.lbfgs()
    state = optimizer.init(params)

    def loss(params):
        return (params["w"] ** 2).sum() + params["w"][0]

    for _ in range(steps):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(
            gradient, state, params, value=value, grad=gradient, value_fn=loss
        )
        params = optax.apply_updates(params, updates)
    return {"params": params, "state": state}


def test_an_optimizer_that_begins_with_one_array_in_several_places_goes_on(backend, path):
    saved = lbfgs({"w": jnp.ones(3)}, steps=2)
    backend.save(saved, path)
    loaded = backend.load_into(lbfgs({"w": jnp.ones(3)}, steps=0), path)
    leaves = [[bits(backend, x) for x in jax.tree.leaves(each)] for each in (saved, loaded)]
    assert leaves[0] == leaves[1]


def test_a_module_s_optimizer_that_begins_with_one_array_in_several_places_is_read(backend, path):
    def build(seed):
        net = nnx.Linear(3, 1, rngs=nnx.Rngs(seed))
        return nnx.Optimizer(net, optax.lbfgs(), wrt=nnx.Param)

    optimizer = build(1)
    names = backend.named_tensors(optimizer)
    save_file({name: np.asarray(np.array(x) + np.ones_like(x)) for name, x in names.items()}, path)
    loaded = backend.load_into(build(2), path)
    for name, x in backend.named_tensors(loaded).items():
        np.testing.assert_array_equal(x, np.array(names[name]) + 1)


def test_arrays_are_loaded_to_a_device_and_bound_to_it(backend, path):
    backend.save([jnp.arange(3), backend.ones(2, device="gpu:0")], path)
    loaded = backend.load(path, device="gpu:1")
    assert [str(backend.device_of(x)) for x in loaded] == ["gpu:1", "gpu:1"]
    assert all(x.committed for x in loaded)


def convolutional(*between, n_in=12):
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Conv(1, 3, (3, 3), rngs=rngs), *between, nnx.Linear(n_in, 2, rngs=rngs)
    )


flatten = partial(jax.lax.collapse, start_dimension=1)


def test_a_dense_layer_behind_a_flattened_convolution_has_its_columns_in_another_order(backend):
    dense = framework_of(backend).files.layers(convolutional(nnx.relu, flatten))[1]
    weight = dense.layout("1.weight", (12, 2))
    assert (weight.split, weight.axes, weight.shape) == ((4, 3, 2), (2, 1, 0), (2, 12))


NOT_STANDARD = {
    "an unknown function behind a convolution": lambda: convolutional(
        lambda x: x.reshape(len(x), -1)
    ),
    "an unknown function behind flattening": lambda: convolutional(flatten, lambda x: x[:, ::-1]),
    "half of the channels": lambda: convolutional(partial(jax.nn.glu, axis=-1), flatten),
    "nothing that flattens": lambda: convolutional(nnx.relu),
    "batch normalization": lambda: nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0))),
    "a layer twice": lambda: nnx.Sequential(*[nnx.Linear(3, 3, rngs=nnx.Rngs(0))] * 2),
    "no sequence": lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("make", NOT_STANDARD.values(), ids=NOT_STANDARD.keys())
def test_no_layers_are_claimed_for_other_models(backend, path, make):
    backend.save(make(), path)
    assert b"layouts" not in path.read_bytes()


def test_the_error_of_a_linen_module_points_to_its_parameters(backend, path):
    module = linen.Dense(2)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
    backend.save(variables, path)
    with pytest.raises(CheckpointError, match="holds no tensors") as caught:
        backend.load_into(module, path)
    assert "params = backend.load_into(params" in caught.value.fix
