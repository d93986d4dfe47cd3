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


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Traineer"):
        d2ldev.Traineer  # noqa: B018
