"""D2L 6.7.3, "Neural Networks and GPUs": an object of another framework is named with it.

Two frameworks in one environment are common. Their models look alike to a reader, and the error has
to say which is active.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from d2ldev import D2LDevWarning, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev.registry.discovery import find_backends
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"
SOURCE = "contract, Containers and errors"
METADATA = "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n"
CALLS = {
    "place": lambda backend, obj, _: backend.place(obj, "cpu"),
    "placement": lambda backend, obj, _: backend.placement(obj),
    "to": lambda backend, obj, _: backend.to(obj, "cpu"),
    "copy": lambda backend, obj, _: backend.copy(obj),
    "replicate": lambda backend, obj, _: backend.replicate(obj, ["cpu"]),
    "device_of": lambda backend, obj, _: backend.device_of(obj),
    "save": lambda backend, obj, path: backend.save(obj, path),
    "load_into": lambda backend, obj, _: backend.load_into(obj, {}),
    "zeros": lambda backend, obj, _: backend.zeros((2,), like=obj),
}


@pytest.fixture
def model_of_another_backend(tmp_path, monkeypatch):
    """Return a model of another backend, which only this test installs and imports."""
    for name in ("other_framework", "other_backend"):
        (tmp_path / f"{name}.py").write_text("requires = ('other_framework',)\n", "utf-8")
    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA, "utf-8")
    points = "[d2ldev.backends]\nother = other_backend:Other\n"
    (folder / "entry_points.txt").write_text(points, "utf-8")
    monkeypatch.setitem(sys.modules, "other_framework", ModuleType("other_framework"))
    sys.path.insert(0, str(tmp_path))
    try:
        find_backends(refresh=True)
        yield type("Model", (), {"__module__": "other_framework.layers"})()
    finally:
        sys.path.remove(str(tmp_path))
        find_backends(refresh=True)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("call", CALLS)
@requirement("errors.name-the-backend", section=SECTION)
def test_an_object_of_another_backend_is_named_with_the_line_that_chooses_it(
    backend, model_of_another_backend, call, is_nested, tmp_path
):
    """Name the other framework in the error for its model, and how to choose it."""
    obj = {"net": [model_of_another_backend]} if is_nested else model_of_another_backend
    with pytest.raises(UnsupportedValueError) as caught:
        CALLS[call](backend, obj, tmp_path / "file")
    assert "of the other backend" in caught.value.problem
    assert f"the {backend.name} backend" in caught.value.problem
    assert "D2LDEV_BACKEND=other" in caught.value.fix
    assert "d2ldev.get_backend('other')" in caught.value.fix


@requirement("files.names-what-no-file-has", section=SECTION, source="contract, Files")
def test_save_names_what_it_cannot_save(backend, place, model_of_another_backend, tmp_path):
    """Warn in ``save`` of an object in a model that no file can have, by its name.

    A loaded model would lack it without a sign.
    """
    net, path = backend.mlp([2, 1], device=place), tmp_path / "net.safetensors"
    if not isinstance(net, framework_of(backend).models.types):
        pytest.skip("its models are containers, which hold nothing else")
    net.kept = model_of_another_backend
    with pytest.warns(D2LDevWarning, match=r"has no kept"):
        backend.save(net, path)
    assert not [name for name in backend.load(path) if name.startswith("kept")]
