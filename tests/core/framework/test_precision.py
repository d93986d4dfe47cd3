"""The precision of products: one switch of the process, or one of each thread; blocks and settings.

What every framework does is in the requirements ``precision.*`` of the suite.
"""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from d2ldev_reference import ReferenceFramework
from processes import run_python

from d2ldev import Backend, ScopeError, Trainer, UnsupportedValueError
from d2ldev.framework import Devices
from d2ldev.framework.precision import MatmulPrecision, SwitchOfEachThread, SwitchOfTheProcess


class OfTheProcess(ReferenceFramework):
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


class OfEachThread(OfTheProcess):
    """A framework with a switch of each thread, and a default."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.local = threading.local()
        self.devices.matmul_precision = lambda: getattr(self.local, "set", None) or self.set[-1]
        self.devices.matmul_scope = lambda precision: Scope(self.local, precision)


class Scope:
    def __init__(self, local, precision):
        self.local, self.precision = local, precision

    def __enter__(self):
        self.before = getattr(self.local, "set", None)
        self.local.set = self.precision

    def __exit__(self, *error):
        if self.local.set != self.precision:
            raise RuntimeError("another block is in force")
        self.local.set = self.before


@pytest.fixture(params=[OfTheProcess, OfEachThread])
def backend(request):
    return Backend(request.param())


def entered(backend, precision):
    with backend.matmul_precision(precision):
        yield


def test_a_framework_without_a_switch_multiplies_in_float32(reference):
    with reference.matmul_precision("medium") as found:
        assert (found, reference.matmul_precision()) == ("highest", "highest")


@pytest.mark.parametrize(
    ("cls", "kind"), [(OfTheProcess, SwitchOfTheProcess), (OfEachThread, SwitchOfEachThread)]
)
def test_a_context_of_the_frameworks_own_makes_a_switch_of_each_thread(cls, kind):
    assert type(cls().matmul_switch) is kind


def test_nothing_is_set_that_nobody_asked_for(backend):
    assert backend.matmul_precision() == "medium"
    assert backend.framework.set == ["medium"]


def test_a_thousand_settings_leave_one(backend):
    for _ in range(1000):
        backend.matmul_precision("high")
    assert backend.matmul_precision() == "high"
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is MatmulPrecision]


def test_a_block_of_each_thread_changes_no_other_thread_not_even_for_a_moment():
    backend = Backend(OfEachThread())
    with backend.matmul_precision("highest"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(backend.matmul_precision).result() == "medium"
    assert backend.framework.set == ["medium"]


def test_a_setting_is_the_default_of_all_threads_and_hides_no_later_one_of_the_frameworks_own():
    backend = Backend(OfEachThread())
    backend.matmul_precision("highest")
    assert backend.framework.set == ["medium", "highest"]
    backend.framework.change("high")
    assert backend.matmul_precision() == "high"


def test_a_block_begun_later_stays_in_force_without_a_gap():
    backend = Backend(OfTheProcess())
    first, second = entered(backend, "highest"), entered(backend, "highest")
    next(first)
    next(second)
    first.close()
    assert backend.framework.set == ["medium", "highest", "highest"]
    second.close()
    assert backend.matmul_precision() == "medium"


def test_what_the_user_sets_in_a_block_by_other_means_ends_with_it(backend):
    with backend.matmul_precision("highest"):
        backend.framework.change("high")
    backend.framework.set[1:] = []
    assert backend.matmul_precision() == "medium"


def test_settings_in_a_block_end_with_it(backend):
    with backend.matmul_precision("highest"):
        for precision in ("high", "medium", "high"):
            backend.matmul_precision(precision)
            assert backend.matmul_precision() == precision
    assert backend.matmul_precision() == "medium"


def test_a_setting_that_is_kept_can_be_entered_later_and_again(backend):
    kept = backend.matmul_precision("highest")
    with backend.matmul_precision("high"):
        with kept, kept:
            assert backend.matmul_precision() == "highest"
        assert backend.matmul_precision() == "high"


def test_a_block_that_another_thread_closes_is_left_or_says_who_can():
    backend = Backend(OfEachThread())
    generator = entered(backend, "highest")
    next(generator)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ScopeError, match="change its precision"):
        pool.submit(generator.close).result()
    assert backend.matmul_precision() == "medium"


def test_a_block_of_the_process_that_another_thread_closes_is_left():
    backend = Backend(OfTheProcess())
    generator = entered(backend, "highest")
    next(generator)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generator.close).result()
    assert backend.matmul_precision() == "medium"


def test_a_block_that_ends_in_one_of_the_frameworks_own_says_so_and_is_put_right():
    backend = Backend(OfEachThread())
    generator = entered(backend, "highest")
    next(generator)
    with Scope(backend.framework.local, "high"):
        with pytest.raises(ScopeError, match="brings this precision back"):
            generator.close()
        assert backend.matmul_precision() == "high"
    assert backend.matmul_precision() == "medium"


class Coarse(ReferenceFramework):
    cannot = {"multiply in float32": "its card has ten bits"}


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda b: b.matmul_precision("highest"), "backend.matmul_precision('high')"),
        (
            lambda b: Trainer(1, backend=b, matmul_precision="highest"),
            "Trainer(max_epochs, matmul_precision='high')",
        ),
    ],
    ids=["backend", "Trainer"],
)
def test_what_a_framework_cannot_multiply_in_is_refused_with_its_reason(call, fix):
    with pytest.raises(UnsupportedValueError) as caught:
        call(Backend(Coarse()))
    assert "cannot multiply in float32: its card has ten bits" in caught.value.problem
    assert caught.value.fix == fix


def test_a_trainer_whose_init_is_the_users_own_checks_it_at_fit(reference):
    class Mine(Trainer):
        def __init__(self):
            self.max_epochs, self.gpus, self.backend = 1, [], reference
            self.matmul_precision = "float32"

    with pytest.raises(UnsupportedValueError, match="matmul_precision: 'float32' is no precision"):
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
def test_the_variable_sets_it_when_the_backend_is_made(value, found):
    environment = {"D2LDEV_MATMUL_PRECISION": value}
    assert run_python(SET, environment=environment) == [found]


def test_a_misspelt_variable_is_an_error_that_names_it():
    ((error,),) = run_python(SET, environment={"D2LDEV_MATMUL_PRECISION": "float32"})
    assert error == (
        "cannot set the precision of products (from D2LDEV_MATMUL_PRECISION='float32'): "
        "'float32' is no precision: there are 'highest', 'high', 'medium'\n"
        "  fix: D2LDEV_MATMUL_PRECISION=highest, which is float32"
    )


def test_without_the_variable_nothing_is_set():
    assert run_python(SET) == [[]]


def test_an_author_who_writes_nothing_has_float32():
    assert Devices.matmul_precision(None) == "highest"
    Devices.set_matmul_precision(None, "medium")()
    assert Devices.matmul_scope(None, "medium") is None
