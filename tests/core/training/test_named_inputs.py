"""Calls with the entries of a batch: the inputs of a model, the target, and what is refused."""

from collections import UserDict
from functools import cached_property, partial, wraps

import numpy as np
import pytest

import d2ldev
from d2ldev import Trainer, UnsupportedValueError
from d2ldev.contract.training import calls, find_roles
from d2ldev.framework import Signature, Weighted, read_signature
from d2ldev.framework.testing import framework_of

DENSE = Signature(("input",), frozenset(["input"]), 1)
MASKED = Signature(("x", "scale", "mask"), frozenset(["x"]), 3)
OPTIONAL = Signature(("x", "z", "labels"), frozenset(), 3)
OPEN = OPTIONAL._replace(takes_names=True)
UNNAMED = Signature(("x", "scale", "mask"), frozenset(["x"]), 3, frozenset(["x", "scale", "mask"]))
ANY = Signature(most=None)
EVERY = Signature(most=None, takes_names=True)
KINDS = framework_of(d2ldev.get_backend("reference")).state.kinds
TOLD = Signature(("x", "mask"), frozenset(["x"]), 2, switches=frozenset(["training"]))


def separate(batch, signature, rule):
    return calls.separate(batch, signature, rule, KINDS)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": 1, "scale": 2, "mask": 3, "y": 4}, {"x": 1, "scale": 2, "mask": 3}),
        ({"y": 4, "mask": 3, "x": 1}, {"x": 1, "mask": 3}),
        ({"labels": 4, "mask": 3, "x": 1}, {"x": 1, "mask": 3}),
        (UserDict({"mask": 3, "labels": 4, "x": 1}), {"x": 1, "mask": 3}),
        (({"mask": 3, "x": 1}, 4), {"x": 1, "mask": 3}),
        ([{"mask": 3, "x": 1}, 4], {"x": 1, "mask": 3}),
        (({"mask": 3, "x": 1, "y": 4},), {"x": 1, "mask": 3}),
    ],
)
def test_a_mapping_gives_inputs_by_name_in_any_order(batch, expected):
    assert separate(batch, MASKED, "compared") == (expected, 4)


@pytest.mark.parametrize("signature", [DENSE, ANY, EVERY], ids=["one", "args", "args and kwargs"])
@pytest.mark.parametrize("key", ["x", "class", "", 0, None, "self"])
def test_a_single_key_goes_to_the_one_input(signature, key):
    assert separate({"y": 4, key: 1}, signature, "compared") == ((1,), 4)
    assert separate(({key: 1}, 4), signature, "compared") == ((1,), 4)
    assert separate({key: 1}, signature, "none") == ((1,), None)
    assert separate({key: 1, "y": 4}, signature, "left out")[0] == (1,)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((3, 4), ((3,), 4)),
        ([3, 1, 4], ((3, 1), 4)),
        ((3, {"y": 1}, 4), ((3, {"y": 1}), 4)),
    ],
)
def test_a_tuple_gives_inputs_by_position(batch, expected):
    assert separate(batch, MASKED, "compared") == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"scale": 2, "x": 1, "y": 4}, (1, 2)),
        ({"mask": None, "scale": None, "x": 1, "labels": 4}, (1, None, None)),
    ],
)
def test_a_model_without_names_gets_inputs_in_its_order(batch, expected):
    assert separate(batch, UNNAMED, "compared") == (expected, 4)


def test_the_fix_of_a_model_that_needs_y_gives_the_target_beside_the_mapping():
    signature = Signature(("x", "y"), frozenset(["x", "y"]))
    with pytest.raises(UnsupportedValueError) as caught:
        separate({"x": 1, "y": 4}, signature, "compared")
    assert caught.value.fix == "yield ({'x': ..., 'y': ...}, target)"
    assert separate(({"x": 1, "y": 4}, 5), signature, "compared") == ({"x": 1, "y": 4}, 5)


def test_a_gap_between_inputs_without_names_is_refused():
    with pytest.raises(UnsupportedValueError, match="'scale' before 'mask'") as error:
        separate({"mask": 3, "x": 1, "y": 4}, UNNAMED, "compared")
    assert "{'x': ..., 'scale': ..., 'mask': ..., 'y': y}" in error.value.fix


@pytest.mark.parametrize(
    ("batch", "signature", "words"),
    [
        ({"x": 1, "mmask": 2, "y": 4}, MASKED, r"did you mean 'mask'\?\n  fix: name it 'mask'"),
        ({"x": 1, "mmask": 2}, MASKED, "did you mean 'mask'"),  # it could be the target
        ({"x": 1, "Label": 2}, OPEN, "did you mean 'labels'"),
        ({"x": 1, "other": 2, "y": 4}, MASKED, "the key 'other' .* 'x', 'scale', 'mask'"),
        ({"a": 1, "b": 2, "y": 4}, DENSE, "the keys 'a', 'b'"),
        ({"a": 1, "b": 2}, DENSE, "the keys 'a', 'b'"),
        ({"a": 1, "b": 2, "y": 4}, ANY, "by position"),
        ({"x": 1, 0: 2, "y": 4}, OPEN, "the key 0"),
        ({"x": 1, "training": 2, "y": 4}, TOLD, "'training' is set by the framework"),
        ({"x": 1, "training": 2}, TOLD, "'training' is set by the framework"),
        ({"x": 1, "training": 2, "y": 3}, TOLD._replace(takes_names=True), "set by the framework"),
        ({"mask": 1, "y": 4}, MASKED, "also needs 'x'"),
        ({"x": 1, "y": 4}, Signature(("x", "y"), frozenset(["x", "y"])), "'y' is the target"),
        ({"x": 1, "z": 2}, OPTIONAL, "loss='model' if the model computes"),
        ({"a": 1, "b": 2}, EVERY, "loss='model' if the model computes"),
        ({"y": 4}, MASKED, "inputs and a target"),
        ({"x": 4}, MASKED, "inputs and a target"),
        ({"X": 4}, DENSE, "inputs and a target"),
        ({}, DENSE, "inputs and a target"),
        ((), DENSE, "inputs and a target"),
        (3, DENSE, "inputs and a target"),
        ([3], DENSE, "inputs and a target"),
        ((3, 4, 5), DENSE, "it takes 'input', and a batch has one target"),
    ],
)
def test_what_cannot_be_given_is_refused(batch, signature, words):
    with pytest.raises(UnsupportedValueError, match=words):
        separate(batch, signature, "compared")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "it is empty"),
        ((), "it is empty"),
        ({"x": 1, "y": 2, "z": 3}, "the key 'y'"),
        ({"x": 1, "sample_weight": 2}, "weigh the examples"),
        ({"x": 1, "zz": 2}, "did you mean 'z'"),
        (({"x": 1}, 2), "the target beside the mapping"),
        ((1, 2, 3, 4), "nothing here takes a target"),
    ],
)
def test_without_a_target_every_key_is_an_input(batch, words):
    assert separate({"z": 1, "labels": 2}, OPTIONAL, "none") == ({"z": 1, "labels": 2}, None)
    with pytest.raises(UnsupportedValueError, match=words):
        separate(batch, OPEN, "none")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (3, (3,)),
        ((3,), (3,)),
        ((3, 4), (3,)),
        ((3, 4, None), (3, 4)),
        ({"z": 3}, {"z": 3}),
        ({"z": 3, "y": 4}, {"z": 3}),
        ({"z": 4, "x": 3, "sample_weight": 6}, {"z": 4, "x": 3}),
        ({"z": 4, "y": 5, "sample_weight": 6}, {"z": 4}),
        (({"z": 4}, 5), {"z": 4}),
        (({"z": 4},), {"z": 4}),
    ],
)
def test_predict_leaves_out_the_target(batch, expected):
    assert separate(batch, OPTIONAL, "left out")[0] == expected


def test_a_prediction_leaves_out_y_alone():
    with pytest.raises(UnsupportedValueError, match="only the target 'y' is left out"):
        separate({"x": 1, "target": 2}, MASKED, "left out")


def test_a_model_that_needs_y_predicts_with_it():
    needs = Signature(("x", "y"), frozenset(["x", "y"]))
    assert separate({"y": 2, "x": 1}, needs, "left out")[0] == {"x": 1, "y": 2}


def test_a_mapping_beside_a_target_may_be_the_one_input_itself():
    given = {"a": 1, "b": 2}
    assert separate((given, 4), DENSE, "compared") == ((given,), 4)
    assert separate({"input": given, "y": 4}, DENSE, "compared") == ({"input": given}, 4)


def test_further_names_take_other_keys_beside_a_target():
    batch = {"x": 1, "segments": 2, "y": 4}
    assert separate(batch, OPEN, "compared") == ({"x": 1, "segments": 2}, 4)
    assert find_roles(tuple(batch), OPEN, "compared").passed_on == ("segments",)
    assert separate({"a": 1, "b": 2, "y": 4}, EVERY, "compared") == ({"a": 1, "b": 2}, 4)
    assert not find_roles(("a", "b", "y"), EVERY, "compared").passed_on


def test_the_sample_weight_of_a_mapping_belongs_to_its_target():
    batch = {"sample_weight": 2, "x": 1, "y": 4}
    expected = {"x": 1}, Weighted(4, 2)
    assert separate(batch, MASKED, "compared") == expected
    assert separate({"x": 1, "labels": 4, "sample_weight": 2}, MASKED, "compared") == expected
    assert separate(({"x": 1, "sample_weight": 2}, 4), MASKED, "compared") == expected


def test_a_models_own_input_of_that_name_stays_one():
    batch = {"sample_weight": 2, "x": 1, "y": 4}
    own = Signature(("x", "sample_weight"), frozenset(["x"]), 2)
    assert separate(batch, own, "compared") == ({"sample_weight": 2, "x": 1}, 4)


class Model:
    def forward(self, x, mask=None, *, scale=1, **options):
        return x

    def only(self, x, /, mask):
        return x

    def anything(self, x, *others):
        return x

    def passes_on(self, *operands, method=None, **options):
        return self.forward(*operands, **options)

    @wraps(forward)
    def wrapper(self, *operands, **options):
        return self.forward(*operands, **options)


FORWARD = Signature(("x", "mask", "scale"), frozenset(["x"]), 2, takes_names=True)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Model().forward, FORWARD),
        (Model().wrapper, FORWARD),
        (partial(Model().forward, mask=2), FORWARD._replace(most=1)),
        (
            partial(Model().forward, 1),
            FORWARD._replace(names=("mask", "scale"), required=frozenset(), most=1),
        ),
        (Model().passes_on, EVERY),
        (Model().anything, Signature(("x",), frozenset(["x"]))),
        (Model().only, Signature(("x", "mask"), frozenset(["x", "mask"]), 2, frozenset(["x"]))),
        ("{}".format, Signature(most=None)),
        (3, Signature(most=None)),
    ],
)
def test_the_signature_of_a_method(method, expected):
    assert read_signature(method) == expected


def test_a_switch_of_the_framework_is_no_input():
    switches = frozenset(["mask", "rngs"])
    found = read_signature(Model().forward, switches=switches)
    assert found == FORWARD._replace(names=("x", "scale"), most=1, switches=switches)


def test_a_model_that_takes_positions_has_no_names_to_give():
    found = read_signature(Model().forward, by_position=True)
    assert found == FORWARD._replace(unnamed=frozenset(FORWARD.names), takes_names=False)


def test_a_run_reads_the_signature_once(reference, monkeypatch):
    net, asked = reference.mlp([2, 1]), []
    learner = type(reference.learner(net))
    signature = cached_property(lambda self: asked.append(1) or ANY)
    signature.__set_name__(learner, "signature")
    monkeypatch.setattr(learner, "signature", signature)
    batch = {"y": np.ones((4, 1), "float32"), "x": np.ones((4, 2), "float32")}
    Trainer(2, backend=reference).fit(net, [batch] * 3)
    assert len(asked) == 1


def test_a_learner_takes_inputs_by_name(reference):
    learner = reference.learner(reference.mlp([2, 1]))
    x, y = reference.ones((4, 2)), reference.zeros((4, 1))
    expected = reference.to_numpy(learner.predict((x,)))
    assert np.array_equal(reference.to_numpy(learner.predict({"x": x})), expected)
    assert np.array_equal(reference.to_numpy(learner.evaluate({"any": x}, y)[1]), expected)
    assert np.array_equal(reference.to_numpy(learner.step({"x": x}, y)[1]), expected)
    with pytest.raises(UnsupportedValueError, match="the key 'mask'"):
        learner.step({"x": x, "mask": y}, y)
