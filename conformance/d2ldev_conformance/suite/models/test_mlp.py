"""D2L 6.7.3, "Neural Networks and GPUs": the small model that every framework has.

Programs of the book and tests of libraries need one small model on each framework. It has to be the
same one for one seed.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, assert_same_values, values_of

SECTION = "6.7.3"
SOURCE = "contract"


@requirement("mlp.shape", section=SECTION, source="D2L")
@pytest.mark.parametrize("sizes", [[3, 1], [3, 4, 2], [5, 8, 8, 1]])
def test_an_mlp_maps_features_to_outputs(backend, place, sizes):
    """Map rows of features to rows of outputs, on the model's device."""
    net = backend.mlp(sizes, device=place)
    y = net(backend.ones((7, sizes[0]), device=place))
    assert backend.to_numpy(y).shape == (7, sizes[-1])
    assert backend.dtype_of(y) == "float32"
    assert backend.device_of(y) is place


@requirement("mlp.parameters", section=SECTION, source="D2L")
def test_an_mlp_has_a_weight_and_a_bias_for_each_layer(backend):
    """Have a weight and a bias in each layer, and nothing else."""
    # Each shape once: a framework that makes gradients with the parameters has them twice.
    shapes = {x.shape for x in values_of(backend, backend.mlp([3, 4, 2])).values()}
    weights = sorted(shape for shape in shapes if len(shape) == 2)
    assert sorted(shape for shape in shapes if len(shape) == 1) == [(2,), (4,)]
    assert [sorted(shape) for shape in weights] in ([[2, 4], [3, 4]], [[3, 4], [2, 4]])


@requirement("mlp.initial-values", section=SECTION)
@pytest.mark.parametrize("sizes", [[16, 400], [400, 16]], ids=str)
def test_weights_are_uniform_below_one_by_the_root_of_the_inputs_and_biases_zero(
    backend, place, sizes
):
    """Draw weights uniformly below one over the root of the inputs, and biases as 0.

    Frameworks have different defaults, and learn at different speeds.
    """
    values = values_of(backend, backend.mlp(sizes, device=place)).values()
    # Gradients that are made with the parameters are zero.
    (weight,) = (value for value in values if value.ndim == 2 and value.any())
    bound = sizes[0] ** -0.5
    assert 0.99 * bound < np.abs(weight).max() <= bound
    np.testing.assert_allclose(
        [weight.mean(), weight.std()], [0, bound / 3**0.5], atol=0.03 * bound
    )
    assert not any(value.any() for value in values if value.ndim == 1)


@requirement("mlp.on-the-device", section=SECTION)
def test_an_mlp_is_made_where_it_is_wanted(backend, place):
    """Make all parameters on the given device."""
    net = backend.mlp([3, 4, 1], device=place)
    assert set(backend.placement(net).values()) == {place}


@requirement("mlp.default-is-the-cpu", section=SECTION)
def test_an_mlp_is_made_on_the_cpu_or_in_the_scope(backend, place):
    """Make a model on the CPU, or on the device of the block around it."""
    assert set(backend.placement(backend.mlp([3, 1])).values()) == {backend.cpu()}
    with backend.on(place):
        net = backend.mlp([3, 1])
    assert set(backend.placement(net).values()) == {place}


@requirement("mlp.seeds", section=SECTION, source="contract, Random numbers")
def test_the_seed_decides_the_parameters(backend, place):
    """Make the same parameters for one seed, and others for another."""
    one, same, other = (backend.mlp([3, 4, 1], seed=seed, device=place) for seed in (1, 1, 2))
    values = values_of(backend, one)
    assert_same_values(backend, same, values)
    others = values_of(backend, other)
    assert any(others[name].tobytes() != value.tobytes() for name, value in values.items())


@requirement("mlp.same-on-every-device", section=SECTION, source="contract, Random numbers")
@pytest.mark.parametrize("by", ["argument", "scope"])
def test_a_seed_is_one_model_on_every_device(backend, place, by):
    """Make the same parameters on each device, bit for bit.

    A comparison of devices has to begin with one model.
    """
    expected = values_of(backend, backend.mlp([5, 7, 3], seed=4, device=backend.cpu()))
    if by == "argument":
        net = backend.mlp([5, 7, 3], seed=4, device=place)
    else:
        with backend.on(place):
            net = backend.mlp([5, 7, 3], seed=4)
    assert set(backend.placement(net).values()) == {place}
    assert_same_values(backend, net, expected)


@requirement("mlp.same-on-every-device", section=SECTION, source="contract, Random numbers")
def test_a_model_is_the_same_where_a_gpu_draws_other_numbers(backend, place, monkeypatch):
    """Make the same parameters where a GPU draws other random numbers.

    CUDA's generator differs from the CPU's, and virtual GPUs do not show it.
    """
    # Virtual GPUs draw the CPU's numbers. CUDA's, in torch, are others.
    draw, tensors = framework_of(backend).tensors.random, framework_of(backend).tensors
    host = backend.native(backend.cpu())

    def draw_others(distribution, shape, seed, dtype, native):
        return draw(distribution, shape, seed + (native != host), dtype, native)

    expected = values_of(backend, backend.mlp([5, 7, 3], seed=4))
    monkeypatch.setattr(tensors, "random", draw_others)
    assert_same_values(backend, backend.mlp([5, 7, 3], seed=4, device=place), expected)


@requirement("mlp.not-constant", section=SECTION)
def test_an_mlp_depends_on_its_input(backend, place):
    """Depend on the input.

    A model of dead units has no gradient.
    """
    net = backend.mlp([3, 16, 1], device=place)
    y = backend.to_numpy(net(backend.rand((8, 3), seed=0, device=place)))
    assert len(set(y.ravel().tolist())) > 1


@requirement("mlp.activations", section=SECTION)
def test_the_activation_is_between_the_layers(backend, place):
    """Apply the chosen activation between the layers."""
    x = backend.rand((8, 3), seed=0, device=place) * 4.0 - 2.0
    results = {
        backend.to_numpy(backend.mlp([3, 16, 1], activation=name, device=place)(x)).tobytes()
        for name in ("relu", "tanh", "sigmoid")
    }
    assert len(results) == 3


@requirement("mlp.last-layer-is-affine", section=SECTION)
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_the_last_layer_has_no_activation(backend, place, activation):
    """Apply no activation after the last layer.

    A regression needs outputs without a bound.
    """
    net = backend.mlp([3, 4], activation=activation, device=place)
    x, y = (4.0 * backend.randn((8, 3), seed=seed, device=place) for seed in (1, 2))
    of_the_sum = backend.to_numpy(net(x + y) + net(x - x))
    np.testing.assert_allclose(of_the_sum, backend.to_numpy(net(x) + net(y)), rtol=1e-3, atol=1e-4)


@requirement("mlp.layers-differ", section=SECTION)
def test_no_two_layers_start_with_the_same_weights(backend, place):
    """Draw other weights for each layer.

    Equal layers come from one seed that is used again.
    """
    values = values_of(backend, backend.mlp([4, 4, 4, 4], device=place)).values()
    # Gradients that are made with the parameters are zero.
    assert len({value.tobytes() for value in values if value.ndim == 2 and value.any()}) == 3


@requirement("mlp.seed-leaves-the-random-state", section=SECTION, source="contract, Random numbers")
def test_a_model_leaves_the_frameworks_random_state_alone(backend, place):
    """Leave the framework's random numbers going on after a model with a seed.

    Otherwise each model would restart the program's random numbers.
    """

    def without_a_seed_after_a_model():
        backend.mlp([3, 4, 1], seed=5, device=place)
        return backend.to_numpy(backend.rand((4, 4), device=place)).tobytes()

    assert without_a_seed_after_a_model() != without_a_seed_after_a_model()


@requirement("mlp.draws-nothing-else", section=SECTION, source="contract, Random numbers")
def test_a_model_draws_nothing_from_the_frameworks_random_state(backend, place):
    """Draw nothing from the framework's random numbers for a model with a seed.

    A model more or less must not change the data's order.
    """

    def draw(*, after_a_model):
        backend.seed(7)
        if after_a_model:
            backend.mlp([3, 4, 1], seed=5, device=place)
        return [backend.to_numpy(backend.rand((4,), device=at)) for at in (backend.cpu(), place)]

    for found, expected in zip(draw(after_a_model=True), draw(after_a_model=False), strict=True):
        assert_same(found, expected)


@requirement("mlp.refuses-nonsense", section=SECTION)
@pytest.mark.parametrize(
    "arguments",
    [
        *([[3], "relu", 0], [[], "relu", 0], [[3, 0], "relu", 0], [[-3, 1], "relu", 0]),
        *([[3.5, 1], "relu", 0], ["31", "relu", 0], [None, "relu", 0]),
        *([[3, 1], "softish", 0], [[3, 1], None, 0], [[3, 1], "relu", "x"]),
    ],
    ids=repr,
)
def test_invalid_sizes_of_an_mlp_are_refused(backend, arguments):
    """Refuse invalid sizes, activations and seeds.

    A layer of size 0 trains without a sign.
    """
    sizes, activation, seed = arguments
    backend.mlp([3, 1])  # a backend without it refuses everything
    with pytest.raises(UnsupportedValueError):
        backend.mlp(sizes, activation=activation, seed=seed)


@requirement("mlp.missing-device", section=SECTION)
def test_an_mlp_on_a_missing_device_is_an_error(backend, missing):
    """Refuse to make a model on a device that does not exist."""
    with pytest.raises(DeviceUnavailableError):
        backend.mlp([3, 1], device=missing)


@requirement("mlp.a-device-beats-the-scope", section=SECTION)
def test_a_model_is_made_where_it_is_wanted_also_in_a_scope(backend, route):
    """Make a model on the device of the argument, also within another block.

    A helper that names a device means it.
    """
    scope, target = route
    with backend.on(scope):
        net = backend.mlp([3, 1], device=target)
    assert set(backend.placement(net).values()) == {target}
