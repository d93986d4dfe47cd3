"""Options that are text, when the program runs: a misspelt one names the nearest that there is."""

import pytest
from launched import together

from d2ldev import (
    Backend,
    EarlyStopping,
    Schedule,
    Trainer,
    UnsupportedValueError,
    cpu,
    gpu,
)
from d2ldev.framework.testing import framework_of

DATA = [([[1.0]], [[1.0]])]


def fit(reference, **options):
    return Trainer(1, backend=reference).fit(reference.mlp([1, 1]), DATA, **options)


class Scheduler:
    def step(self):
        pass


MISSPELT = {
    "loss": (lambda b: fit(b, loss="cross-entropy"), "cross_entropy"),
    "optimizer": (lambda b: fit(b, optimizer="Adam"), "adam"),
    "the mode of the best": (lambda b: fit(b, best="x", monitor="lr", mode="maxx"), "max"),
    "metrics": (lambda b: fit(b, metrics=["acuracy"]), "accuracy"),
    "precision": (lambda b: Trainer(1, backend=b, precision="bf-16"), "bf16"),
    "batch_norm": (lambda b: Trainer(1, backend=b, batch_norm="globl"), "global"),
    "matmul_precision": (lambda b: Trainer(1, backend=b, matmul_precision="hihg"), "high"),
    "a block": (lambda b: b.matmul_precision("highst"), "highest"),
    "activation": (lambda b: b.mlp([1, 1], activation="rleu"), "relu"),
    "mode": (lambda b: EarlyStopping(mode="maxx"), "max"),
    "per": (lambda b: Schedule(Scheduler(), per="epochs"), "epoch"),
    "a learner": (lambda b: b.learner(b.mlp([1, 1]), optimizer="momentun"), "momentum"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_option_names_the_nearest_one(reference, name):
    call, meant = MISSPELT[name]
    with pytest.raises(UnsupportedValueError, match=f"'{meant}'.*did you mean '{meant}'"):
        call(reference)


@pytest.mark.parametrize("name", ["loss", "optimizer", "precision", "batch_norm"])
def test_the_line_that_fixes_it_has_the_nearest_one(reference, name):
    call, meant = MISSPELT[name]
    with pytest.raises(UnsupportedValueError) as caught:
        call(reference)
    assert caught.value.fix == f"{name}={meant!r}"


@pytest.mark.parametrize("value", [3, None, "", "nothing of the kind", ["adam"], "x" * 10**6])
def test_any_other_value_is_refused_with_the_choices(reference, value):
    with pytest.raises(UnsupportedValueError, match="it must be one of 'relu', "):
        reference.mlp([1, 1], activation=value)


# -- num_gpus -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_auto_is_all_existing_gpus(reference, number):
    backend = Backend(type(framework_of(reference))(virtual_gpus=number))
    assert Trainer(1, num_gpus="auto", backend=backend).gpus == [gpu(i) for i in range(number)]


def test_auto_is_the_cpu_without_gpus(reference):
    backend = Backend(type(framework_of(reference))(virtual_gpus=0))
    assert Trainer(1, num_gpus="auto", backend=backend).device == cpu()


@pytest.mark.parametrize(("number", "expected"), [(2, ["gpu:0", "gpu:1"]), (0, ["cpu", "cpu"])])
def test_auto_is_the_own_gpu_of_each_process_of_a_launch(reference, number, expected):
    backend = Backend(type(framework_of(reference))(virtual_gpus=number))
    found = together(lambda _: str(Trainer(1, num_gpus="auto", backend=backend).device))
    assert [each.value for each in found] == expected


@pytest.mark.parametrize("number", ["all", "AUTO", "", 1.5, None, [1]])
def test_another_word_is_not_a_number_of_gpus(reference, number):
    with pytest.raises(UnsupportedValueError, match="num_gpus='auto' for all"):
        Trainer(1, num_gpus=number, backend=reference)
