"""``backend_of``: from the tensor's type, importing nothing new."""

import array_api_strict as xp
import numpy as np
import pytest
from processes import FRAMEWORKS, MINE, make_backend, make_package, run_python

import d2ldev

SETTING = (
    MINE
    + """
    def __init__(self, virtual_gpus=None):
        import os

        super().__init__(virtual_gpus)
        os.environ["SET_BY_A_FRAMEWORK"] = "1"
"""
)


def test_backend_of_a_tensor_that_the_user_made(reference):
    assert d2ldev.backend_of(xp.zeros(3)) is reference


def test_backend_of_finds_a_backend_that_was_not_used_before():
    code = """
        import array_api_strict as xp, d2ldev
        show(d2ldev.backend_of(xp.zeros(3)).name)
    """
    assert run_python(code) == ["reference"]


def test_backend_of_does_not_change_the_active_one(reference, other):
    with d2ldev.use_backend(other):
        d2ldev.backend_of(xp.zeros(3))
        assert d2ldev.get_backend(d2ldev.backend) is other


@pytest.mark.parametrize("value", [None, 1.0, "x", [1.0], np.zeros(3), np.float32(1)], ids=repr)
def test_backend_of_an_object_that_is_not_a_tensor_is_refused(value):
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    message = f"tell the backend of a {kind}: it is not a tensor of an imported framework"
    with pytest.raises(d2ldev.UnsupportedValueError, match=message):
        d2ldev.backend_of(value)


def test_backend_of_imports_no_framework(install):
    code = f"""
        import sys, d2ldev
        try:
            d2ldev.backend_of(1.0)
        except d2ldev.UnsupportedValueError:
            show(sorted({{*{FRAMEWORKS}, "numpy", "array_api_strict"}} & set(sys.modules)))
    """
    assert run_python(code, path=[install(*FRAMEWORKS)]) == [[]]


def test_backend_of_makes_no_framework_whose_tensor_it_is_not(tmp_path):
    make_package(tmp_path, "torch")
    make_backend(tmp_path, "torch", requires=["torch"], source=SETTING)
    code = """
        import os, torch, array_api_strict as xp, d2ldev
        for x in (xp.zeros(3), 1.0, [1.0], object()):
            try:
                d2ldev.backend_of(x)
            except d2ldev.UnsupportedValueError:
                pass
        show(os.environ.get("SET_BY_A_FRAMEWORK"))
    """
    assert run_python(code, path=[tmp_path]) == [None]


def test_backend_of_is_not_hindered_by_another_backend_that_is_broken(tmp_path):
    make_package(tmp_path, "torch")
    make_backend(tmp_path, "torch", requires=["torch"], source="import no_such_module")
    code = """
        import torch, array_api_strict as xp, d2ldev
        show(d2ldev.backend_of(xp.zeros(3)).name)
    """
    assert run_python(code, path=[tmp_path]) == ["reference"]


def test_backend_of_a_tensor_whose_backend_is_broken_names_the_cause(tmp_path):
    make_package(tmp_path, "torch", "class Tensor: pass")
    make_backend(tmp_path, "torch", requires=["torch"], source="import no_such_module")
    code = """
        import torch, d2ldev
        try:
            d2ldev.backend_of(torch.Tensor())
        except d2ldev.UnsupportedValueError as error:
            show([str(error), str(error.__cause__)])
    """
    ((message, cause),) = run_python(code, path=[tmp_path])
    assert message.startswith("cannot tell the backend of a torch.Tensor: its backend fails: ")
    assert "No module named 'no_such_module'" in message
    assert "No module named 'no_such_module'" in cause
