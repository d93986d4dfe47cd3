"""D2L 6.7.3, "Neural Networks and GPUs": models and optimizers are moved once, and whole."""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import DeviceUnavailableError, UnsupportedValueError
from d2ldev_conformance.data import assert_same
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"


def _values(backend, obj):
    return {name: backend.to_numpy(x) for name, x in backend.named_tensors(obj).items()}


def _assert_same_values(backend, obj, values):
    after = _values(backend, obj)
    assert list(after) == list(values)
    for name, value in values.items():
        assert_same(after[name], value)


def _ties(backend, obj):
    """Which names are one tensor: a set of groups of names."""
    groups = {}
    for name, x in backend.named_tensors(obj).items():
        groups.setdefault(id(x), []).append(name)
    return sorted(map(tuple, groups.values()))


@requirement("mlp.shape", section=SECTION)
@pytest.mark.parametrize("sizes", [[3, 1], [3, 4, 2], [5, 8, 8, 1]])
def test_an_mlp_maps_features_to_outputs(backend, place, sizes):
    net = backend.mlp(sizes, device=place)
    y = net(backend.ones((7, sizes[0]), device=place))
    assert backend.to_numpy(y).shape == (7, sizes[-1])
    assert backend.dtype_of(y) == "float32"
    assert backend.device_of(y) is place


@requirement("mlp.parameters", section=SECTION)
def test_an_mlp_has_a_weight_and_a_bias_for_each_layer(backend):
    # Each shape once: a framework that makes gradients with the parameters has them twice.
    shapes = {x.shape for x in _values(backend, backend.mlp([3, 4, 2])).values()}
    weights = sorted(shape for shape in shapes if len(shape) == 2)
    assert sorted(shape for shape in shapes if len(shape) == 1) == [(2,), (4,)]
    assert [sorted(shape) for shape in weights] in ([[2, 4], [3, 4]], [[3, 4], [2, 4]])


@requirement("mlp.on-the-device", section=SECTION)
def test_an_mlp_is_made_where_it_is_wanted(backend, place, monkeypatch):
    monkeypatch.setattr(backend, "_copy", None)
    monkeypatch.setattr(backend, "_copy_all", None)
    net = backend.mlp([3, 4, 1], device=place)
    assert set(backend.placement(net).values()) == {place}


@requirement("mlp.default-is-the-cpu", section=SECTION)
def test_an_mlp_is_made_on_the_cpu_or_in_the_scope(backend, place):
    assert set(backend.placement(backend.mlp([3, 1])).values()) == {backend.cpu()}
    with backend.on(place):
        net = backend.mlp([3, 1])
    assert set(backend.placement(net).values()) == {place}


@requirement("mlp.seeds", section=SECTION)
def test_the_seed_decides_the_parameters(backend, place):
    one, same, other = (backend.mlp([3, 4, 1], seed=seed, device=place) for seed in (1, 1, 2))
    values = _values(backend, one)
    _assert_same_values(backend, same, values)
    others = _values(backend, other)
    assert any(others[name].tobytes() != value.tobytes() for name, value in values.items())


@requirement("mlp.not-constant", section=SECTION)
def test_an_mlp_depends_on_its_input(backend, place):
    net = backend.mlp([3, 16, 1], device=place)
    y = backend.to_numpy(net(backend.rand((8, 3), seed=0, device=place)))
    assert len(set(y.ravel().tolist())) > 1


@requirement("mlp.activations", section=SECTION)
def test_the_activation_is_between_the_layers(backend, place):
    x = backend.rand((8, 3), seed=0, device=place) * 4.0 - 2.0
    results = {
        backend.to_numpy(backend.mlp([3, 16, 1], activation=name, device=place)(x)).tobytes()
        for name in ("relu", "tanh", "sigmoid")
    }
    assert len(results) == 3


@requirement("mlp.refuses-nonsense", section=SECTION)
@pytest.mark.parametrize("arguments", [([3], "relu"), ([], "relu"), ([3, 1], "softish")])
def test_an_mlp_that_is_none_is_refused(backend, arguments):
    sizes, activation = arguments
    with pytest.raises(UnsupportedValueError):
        backend.mlp(sizes, activation=activation)


@requirement("mlp.missing-device", section=SECTION)
def test_an_mlp_on_a_missing_device_is_an_error(backend, missing):
    with pytest.raises(DeviceUnavailableError):
        backend.mlp([3, 1], device=missing)


@requirement("place.moves-everything", section=SECTION)
def test_place_moves_everything(backend, route, sample):
    source, target = route
    obj = backend.samples()[sample](source)
    assert set(backend.placement(obj).values()) == {source}
    placed = backend.place(obj, target)
    assert set(backend.placement(placed).values()) == {target}


@requirement("place.keeps-names", section=SECTION)
def test_place_keeps_the_names(backend, route, sample):
    source, target = route
    obj = backend.samples()[sample](source)
    names = list(backend.placement(obj))
    assert len(names) == len(set(names)) > 0
    assert list(backend.placement(backend.place(obj, target))) == names


@requirement("place.keeps-values", section=SECTION)
def test_place_keeps_every_value(backend, route, sample):
    source, target = route
    obj = backend.samples()[sample](source)
    values = _values(backend, obj)
    _assert_same_values(backend, backend.place(obj, target), values)


@requirement("place.keeps-ties", section=SECTION)
def test_place_keeps_what_is_tied(backend, route, sample):
    source, target = route
    obj = backend.samples()[sample](source)
    ties = _ties(backend, obj)
    assert _ties(backend, backend.place(obj, target)) == ties


@requirement("place.there-and-back", section=SECTION)
def test_place_there_and_back_changes_nothing(backend, route, sample):
    source, target = route
    obj = backend.samples()[sample](source)
    values = _values(backend, obj)
    back = backend.place(backend.place(obj, target), source)
    assert set(backend.placement(back).values()) == {source}
    _assert_same_values(backend, back, values)


@requirement("place.noop-returns-same-object", section=SECTION)
def test_place_of_what_is_there_does_nothing(backend, place, sample):
    obj = backend.samples()[sample](place)
    before = backend.named_tensors(obj)
    assert backend.place(obj, place) is obj
    after = backend.named_tensors(obj)
    assert all(after[name] is x for name, x in before.items())


@requirement("place.copies-nothing-twice", section=SECTION)
def test_place_copies_each_tensor_once(backend, route, sample, monkeypatch):
    source, target = route
    obj = backend.samples()[sample](source)
    original, copied = backend._copy_all, []

    def counting(xs, native):
        copied.extend(xs)
        return original(xs, native)

    monkeypatch.setattr(backend, "_copy_all", counting)
    distinct = {id(x) for x in backend.named_tensors(obj).values()}
    backend.place(obj, target)
    assert len(copied) == len({id(x) for x in copied}) == len(distinct)


@requirement("place.all-or-nothing", section=SECTION)
def test_a_failure_halfway_leaves_everything_where_it_was(backend, route, sample, monkeypatch):
    source, target = route
    obj = backend.samples()[sample](source)
    tensors, values = backend.named_tensors(obj), _values(backend, obj)
    original = backend._copy_all

    def fails_at_the_last(xs, native):
        original(xs[:-1], native)
        raise MemoryError("none left")

    monkeypatch.setattr(backend, "_copy_all", fails_at_the_last)
    with pytest.raises(MemoryError):
        backend.place(obj, target)
    assert set(backend.placement(obj).values()) == {source}
    assert all(backend.named_tensors(obj)[name] is x for name, x in tensors.items())
    _assert_same_values(backend, obj, values)


@requirement("place.missing-device", section=SECTION)
def test_place_on_a_missing_device_moves_nothing(backend, place, missing, sample):
    obj = backend.samples()[sample](place)
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        backend.place(obj, missing)
    assert set(backend.placement(obj).values()) == {place}


@requirement("place.result-is-where-the-model-is", section=SECTION)
def test_a_placed_model_computes_where_it_is(backend, route):
    source, target = route
    net = backend.place(backend.mlp([3, 4, 1], device=source), target)
    y = net(backend.ones((2, 3), device=target))
    assert backend.device_of(y) is target


@requirement("place.same-function", section=SECTION)
def test_a_placed_model_is_the_same_function(backend, route):
    source, target = route
    net = backend.mlp([3, 16, 2], device=source)
    x = backend.rand((5, 3), seed=0, device=source)
    before = backend.to_numpy(net(x))
    net = backend.place(net, target)
    after = backend.to_numpy(net(backend.to(x, target)))
    # Devices add in other orders: a few units in the last place of sums of 16 terms.
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@requirement("place.leaves-the-default-device", section=SECTION)
def test_place_leaves_the_default_device_alone(backend, route):
    source, target = route
    before = backend.default_device()
    backend.place(backend.mlp([3, 1], device=source), target)
    assert backend.default_device() is before
    assert backend.device_of(backend.ones(1)) is backend.cpu()


@requirement("place.pytrees", section=SECTION)
def test_a_pytree_of_parameters_is_placed(backend, route):
    source, target = route
    weight = backend.ones((2, 2), device=source)
    tree = {"layers": [{"weight": weight}, {"weight": weight}], "step": 3, "name": "net"}
    placed = backend.place(tree, target)
    assert backend.placement(placed) == {
        "layers.0.weight": target,
        "layers.1.weight": target,
    }
    assert placed["layers"][0]["weight"] is placed["layers"][1]["weight"]
    assert (placed["step"], placed["name"]) == (3, "net")


@requirement("place.several-at-once", section=SECTION)
def test_several_objects_are_placed_at_once(backend, route, sample):
    source, target = route
    pair = (backend.samples()[sample](source), [backend.ones(1, device=source)])
    placed = backend.place(pair, target)
    assert type(placed) is tuple
    assert set(backend.placement(placed).values()) == {target}


@requirement("place.refuses-others", section=SECTION)
@pytest.mark.parametrize("value", [object(), {"net": len}, np.zeros(2)], ids=str)
def test_what_is_no_model_is_refused(backend, place, value):
    with pytest.raises(UnsupportedValueError, match="place"):
        backend.place(value, place)


@requirement("place.named-tensors", section=SECTION)
def test_named_tensors_are_those_of_the_placement(backend, place, sample):
    obj = backend.samples()[sample](place)
    named = backend.named_tensors(obj)
    assert {name: backend.device_of(x) for name, x in named.items()} == backend.placement(obj)
    assert all(isinstance(x, backend.tensor_types) for x in named.values())
