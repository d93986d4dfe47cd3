"""What ``d2ldev`` has at the top; what few programs need is imported when it is asked for."""

import pytest
from processes import run_python

import d2ldev


@pytest.mark.parametrize("name", d2ldev.__all__)
def test_every_name_is_there(name):
    assert getattr(d2ldev, name) is not None


@pytest.mark.parametrize("name", ["ArrayLoader", "DeviceLog", "Schedule", "Trainer"])
def test_what_trains_is_imported_when_it_is_asked_for(name):
    code = f"""
        import sys, d2ldev
        modules = {{"callbacks", "data", "log", "trainer"}}
        def loaded():
            return sorted(m for m in modules if f"d2ldev.training.{{m}}" in sys.modules)
        show(loaded())
        show(d2ldev.{name}.__name__)
        show(d2ldev.{name} is d2ldev.{name})
    """
    assert run_python(code) == [[], name, True]


def test_what_only_a_launch_needs_is_not_imported():
    code = """
        import sys, d2ldev
        rare = {"d2ldev.processes", "d2ldev.launch", "selectors", "socket"}
        show(sorted(rare & set(sys.modules)))
    """
    assert run_python(code) == [[]]


def test_operations_that_few_programs_need_are_imported_at_their_first_use():
    code = """
        import sys
        from d2ldev import backend, use_backend
        rare = {"mlp", "parallel", "prefetching", "steps", "timing"}
        def loaded():
            return sorted(m for m in rare if f"d2ldev.operations.{m}" in sys.modules)
        before = loaded()
        with use_backend("reference") as b:
            b.mlp([2, 2])
            list(b.prefetch([b.ones(2)], "cpu"))
            b.split(b.ones(2), ["cpu"])
            b.timeit(lambda: None, seconds=0.001)
        show([before, [m for m in loaded() if m != "steps"]])
    """
    assert run_python(code) == [[[], ["mlp", "parallel", "prefetching", "timing"]]]


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Traineer"):
        d2ldev.Traineer  # noqa: B018
