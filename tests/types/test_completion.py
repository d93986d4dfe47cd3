"""What an editor offers of ``Backend``, by jedi, which IPython and many editors complete with."""

from __future__ import annotations

import inspect

import jedi
import pytest

from d2ldev import Backend

PUBLIC = sorted(name for name in dir(Backend) if not name.startswith("_"))
METHODS = [name for name in PUBLIC if inspect.isfunction(inspect.getattr_static(Backend, name))]

LINES = ["from d2ldev import backend", "from d2ldev import torch as backend"]


@pytest.fixture(scope="module", params=LINES)
def line(request):
    return request.param


@pytest.fixture(scope="module")
def offered(line):
    return {each.name: each for each in jedi.Script(f"{line}\nbackend.").complete()}


def test_an_editor_offers_the_public_names_alone(offered):
    assert {name for name in offered if not name.startswith("_")} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_an_editor_shows_the_docstring_of_a_name(offered, name):
    shown = offered[name].docstring(raw=True)
    assert shown == inspect.getdoc(inspect.getattr_static(Backend, name))


@pytest.mark.parametrize("name", METHODS)
def test_an_editor_shows_the_parameters_of_a_method(line, name):
    signatures = jedi.Script(f"{line}\nbackend.{name}(").get_signatures()
    names = {each.name for signature in signatures for each in signature.params}
    assert names == inspect.signature(getattr(Backend, name)).parameters.keys() - {"self"}
