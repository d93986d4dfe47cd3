"""The precision of products: one switch of the process; blocks and settings.

What every framework does is in the requirements ``precision.*`` of the suite.
"""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import run_python
from reference_backend import ReferenceFramework

from d2ldev import Backend, Trainer, UnsupportedValueError
from d2ldev.contract.precision import MatmulPrecision
from d2ldev.framework import Devices
from d2ldev.framework.testing import framework_of


class OneSwitch(ReferenceFramework):
    """A framework with one switch."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.set = ["medium"]
        self.devices.matmul_precision = lambda: self.set[-1]
        self.devices.set_matmul_precision = self.change

    def change(self, precision):
        before = self.set[-1]
        self.set.append(precision)
        return lambda: self.set.append(before)


@pytest.fixture
def backend():
    return Backend(OneSwitch())


def enter(backend, precision):
    with backend.matmul_precision(precision):
        yield


def test_a_framework_without_a_switch_multiplies_in_float32(reference):
    with reference.matmul_precision("medium") as found:
        assert (found, reference.matmul_precision()) == ("highest", "highest")


def test_nothing_is_set_without_a_request(backend):
    assert backend.matmul_precision() == "medium"
    assert framework_of(backend).set == ["medium"]


def test_a_thousand_settings_leave_one(backend):
    for _ in range(1000):
        backend.matmul_precision("high")
    assert backend.matmul_precision() == "high"
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is MatmulPrecision]


def test_a_block_begun_later_stays_in_force_without_a_gap(backend):
    first, second = enter(backend, "highest"), enter(backend, "highest")
    next(first)
    next(second)
    first.close()
    assert framework_of(backend).set == ["medium", "highest", "highest"]
    second.close()
    assert backend.matmul_precision() == "medium"


def test_settings_by_other_means_end_with_the_block(backend):
    with backend.matmul_precision("highest"):
        framework_of(backend).change("high")
    framework_of(backend).set[1:] = []
    assert backend.matmul_precision() == "medium"


def test_a_setting_that_is_kept_can_be_entered_later_and_again(backend):
    kept = backend.matmul_precision("highest")
    with backend.matmul_precision("high"):
        with kept, kept:
            assert backend.matmul_precision() == "highest"
        assert backend.matmul_precision() == "high"


def test_a_setting_that_is_kept_is_over_with_the_next_one(backend):
    kept = backend.matmul_precision("highest")  # as the output of a cell in a notebook
    backend.matmul_precision("high")
    assert backend.matmul_precision() == "high"
    del kept
    assert backend.matmul_precision() == "high"


def test_a_setting_that_is_kept_ends_with_the_block_in_which_it_was_made(backend):
    with backend.matmul_precision("high"):
        kept = backend.matmul_precision("highest")
    assert backend.matmul_precision() == "medium"
    with kept:
        assert backend.matmul_precision() == "highest"
    del kept
    assert backend.matmul_precision() == "medium"


def test_a_block_is_in_force_whatever_was_set_since_it_was_made(backend):
    kept = backend.matmul_precision("highest")
    backend.matmul_precision("high")
    with kept as found:
        assert found == backend.matmul_precision() == "highest"
    assert backend.matmul_precision() == "high"


def test_blocks_that_two_threads_make_at_once_leave_nothing_behind(backend):
    first, second = backend.matmul_precision("highest"), backend.matmul_precision("high")
    with first:
        assert backend.matmul_precision() == "highest"
        with second:
            assert backend.matmul_precision() == "high"
        assert backend.matmul_precision() == "highest"
    assert backend.matmul_precision() == "medium"


def test_a_block_that_another_thread_closes_is_left(backend):
    generator = enter(backend, "highest")
    next(generator)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generator.close).result()
    assert backend.matmul_precision() == "medium"


class Coarse(ReferenceFramework):
    cannot = {"multiply in float32": "its card has ten bits"}


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda b: b.matmul_precision("highest"), "backend.matmul_precision('high')"),
        (
            lambda b: Trainer(1, backend=b, matmul_precision="highest"),
            "matmul_precision='high'",
        ),
    ],
    ids=["backend", "Trainer"],
)
def test_an_unsupported_precision_is_refused_with_its_reason(call, fix):
    with pytest.raises(UnsupportedValueError) as caught:
        call(Backend(Coarse()))
    assert "cannot multiply in float32: its card has ten bits" in caught.value.problem
    assert caught.value.fix == fix


def test_a_trainer_whose_init_is_the_users_own_checks_it_at_fit(reference):
    class Mine(Trainer):
        def __init__(self):
            self.max_epochs, self.gpus, self.backend = 1, [], reference
            self.matmul_precision = "float32"

    with pytest.raises(
        UnsupportedValueError, match="matmul_precision: 'float32' is not a precision"
    ):
        Mine().fit(reference.mlp([1, 1]), [])


# -- the variable -----------------------------------------------------------------------------

SET = """
    import d2ldev
    from d2ldev_reference.devices import ReferenceDevices
    made = []
    ReferenceDevices.set_matmul_precision = lambda self, name: (made.append(name), lambda: None)[1]
    try:
        d2ldev.get_backend("reference")
    except d2ldev.D2LDevError as error:
        made.append(str(error))
    show(made)
"""


@pytest.mark.parametrize(
    ("value", "found"), [(" Highest ", ["highest"]), ("medium", ["medium"]), ("", [])]
)
def test_the_variable_sets_the_precision_when_the_backend_is_made(value, found):
    environment = {"D2LDEV_MATMUL_PRECISION": value}
    assert run_python(SET, environment=environment) == [found]


def test_a_misspelt_variable_is_an_error_that_names_it():
    ((error,),) = run_python(SET, environment={"D2LDEV_MATMUL_PRECISION": "float32"})
    assert error == (
        "cannot set the precision of products (from D2LDEV_MATMUL_PRECISION='float32'): "
        "'float32' is not a precision: it must be one of 'highest', 'high', 'medium'\n"
        "  fix: D2LDEV_MATMUL_PRECISION=highest, which is float32"
    )


def test_without_the_variable_nothing_is_set():
    assert run_python(SET) == [[]]


def test_a_backend_without_precisions_has_float32():
    assert Devices.matmul_precision(None) == "highest"
    Devices.set_matmul_precision(None, "medium")()
