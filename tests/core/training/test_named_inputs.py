"""The inputs of a batch that is a dict: by name where the names are the model's."""

import numpy as np
import pytest

from d2ldev import UnsupportedValueError
from d2ldev.areas import Weighted
from d2ldev.operations.steps import input_names
from d2ldev.training.data import inputs_and_target
from d2ldev.training.trainer import Trainer

NAMES = ("x", "scale", "mask")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": 1, "scale": 2, "mask": 3, "y": 4}, (1, 2, 3)),
        ({"y": 4, "mask": 3, "x": 1, "scale": 2}, (1, 2, 3)),
        ({"scale": 2, "x": 1, "y": 4}, (1, 2)),
        ({"mask": None, "scale": None, "x": 1, "labels": 4}, (1, None, None)),
    ],
)
def test_several_inputs_are_given_by_name(batch, expected):
    assert inputs_and_target(batch, NAMES) == (expected, 4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"mask": 3, "pixels": 1, "y": 4}, (3, 1)),  # one is not the model's
        ({"b": 2, "a": 1, "y": 4}, (2, 1)),  # none is
        ({"mask": 3, "y": 4}, (3,)),  # only one
        ([3, 1, 4], (3, 1)),  # no names
    ],
)
def test_otherwise_inputs_are_given_in_their_order(batch, expected):
    assert inputs_and_target(batch, NAMES) == (expected, 4)


def test_a_model_that_does_not_say_gets_inputs_in_their_order():
    assert inputs_and_target({"mask": 3, "x": 1, "y": 4}, ()) == ((3, 1), 4)


def test_a_gap_between_inputs_is_refused_with_all_names():
    with pytest.raises(UnsupportedValueError, match="'scale' before 'mask'") as error:
        inputs_and_target({"mask": 3, "x": 1, "y": 4}, NAMES)
    assert "{'x': ..., 'scale': ..., 'mask': ..., 'y': y}" in error.value.fix


def test_a_model_that_takes_a_mapping_gets_one():
    batch = {"y": 4, "mask": 3, "x": 1}
    assert inputs_and_target(batch, NAMES, takes_mapping=True) == (({"mask": 3, "x": 1},), 4)


def test_a_model_that_takes_a_mapping_gets_none_with_other_keys():
    batch = {"a": 3, "x": 1, "y": 4}
    assert inputs_and_target(batch, NAMES, takes_mapping=True) == ((3, 1), 4)


@pytest.mark.parametrize("takes_mapping", [True, False])
def test_a_mapping_without_inputs_is_refused(takes_mapping):
    with pytest.raises(UnsupportedValueError, match="inputs and a target"):
        inputs_and_target({"y": 4}, NAMES, takes_mapping)


class Model:
    def forward(self, x, mask=None, *, scale=1, **options):
        return x

    def anything(self, x, *others):
        return x


def test_the_names_of_inputs_are_those_that_are_given_by_position():
    assert input_names(Model().forward) == ("x", "mask")


@pytest.mark.parametrize("method", [Model().anything, "{}".format, 3])
def test_a_method_that_takes_any_arguments_has_no_input_names(method):
    assert input_names(method) == ()


def test_a_run_reads_the_names_of_inputs_once(reference, monkeypatch):
    net, asked = reference.mlp([2, 1]), []
    learner = type(reference.learner(net))
    monkeypatch.setattr(learner, "input_names", property(lambda self: asked.append(1) or ("x",)))
    batch = {"y": np.ones((4, 1), "float32"), "x": np.ones((4, 2), "float32")}
    Trainer(2, backend=reference).fit(net, [batch] * 3)
    assert len(asked) == 1


@pytest.mark.parametrize("names", [(), NAMES])
def test_the_sample_weight_of_a_dict_belongs_to_its_target(names):
    batch = {"sample_weight": 2, "x": 1, "y": 4}
    assert inputs_and_target(batch, names) == ((1,), Weighted(4, 2))
    assert inputs_and_target({"x": 1, "labels": 4, "sample_weight": 2}, names) == (
        (1,),
        Weighted(4, 2),
    )


def test_a_models_own_input_of_that_name_stays_one():
    batch = {"sample_weight": 2, "x": 1, "y": 4}
    assert inputs_and_target(batch, ("x", "sample_weight")) == ((1, 2), 4)
