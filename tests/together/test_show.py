"""``show`` asks the framework of the model, whichever backend is active."""

import pytest
from processes import FRAMEWORKS

import d2ldev


@pytest.mark.parametrize("active", FRAMEWORKS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_show_finds_the_framework_of_a_model(name, active, capsys):
    net = d2ldev.get_backend(name).mlp([3, 4, 1])
    with d2ldev.use_backend(active):
        d2ldev.show({"nets": [net]})
    *_, total = capsys.readouterr().out.splitlines()
    assert total.split() == ["total", "21", "21", "0", "<", "0.001", "float32", "cpu"]
