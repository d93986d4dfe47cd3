"""The pictures of the explanation show names that exist, and figures that were measured."""

import importlib.util
import re
import runpy
import sys
from importlib.metadata import entry_points
from inspect import get_annotations
from pathlib import Path
from xml.etree import ElementTree

import pytest

import d2ldev
import d2ldev.framework
from d2ldev.framework.testing import MODULES

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "explanation"
PICTURES = sorted(FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
# Where the names of classes that are not public are.
MODULES_OF_PICTURES = ("training.feed", "training.run", "operations")


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return runpy.run_path(str(ROOT / "tools" / "pictures.py"))
    finally:
        sys.path.remove(str(ROOT / "tools"))


def list_names(picture):
    """Return the full names in a picture, each with the text that it shows."""
    texts = ElementTree.parse(picture).iter(f"{SVG}text")
    return {text.get("data-name"): text.text for text in texts if text.get("data-name")}


def exists(name):
    """Return whether a name of a picture is that of a module, a class, an attribute or a method."""
    if name.startswith("d2ldev"):
        return importlib.util.find_spec(name) is not None
    inner = [importlib.import_module(f"d2ldev.{each}") for each in MODULES_OF_PICTURES]
    first, _, rest = name.partition(".")
    found = [
        getattr(owner, first)
        for owner in (d2ldev, d2ldev.framework, *inner)
        if hasattr(owner, first)
    ]
    return bool(found) and (
        not rest or hasattr(found[0], rest) or rest in get_annotations(found[0])
    )


def test_each_picture_is_drawn_by_the_tool(tool):
    assert {path.stem for path in PICTURES} == {*tool["PICTURES"]}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_up_to_date(picture, tool):
    assert picture.read_text(encoding="utf-8") == tool["PICTURES"][picture.stem]()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_the_names_in_a_picture_exist(picture):
    names = list_names(picture)
    assert [name for name in names if not exists(name)] == []
    assert all(f".{name}".endswith(f".{shown}") for name, shown in names.items())


@pytest.mark.parametrize("name", ["Backend.too", "Frontend", "d2ldev.nothing", "Framework.rooms"])
def test_a_name_that_does_not_exist_is_found(name):
    assert not exists(name)


def test_the_picture_of_the_layers_shows_each_area_and_each_package():
    names = list_names(FOLDER / "layers.svg")
    areas = {name.removeprefix("Framework.") for name in names if name.startswith("Framework.")}
    assert areas == {*MODULES}
    packages = {each.module for each in entry_points(group="d2ldev.backends")}
    assert {name for name in names if name.startswith("d2ldev_")} == packages - {"d2ldev_reference"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_fits_a_phone_and_has_colours_for_the_dark(picture):
    text = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert int(root.get("width")) <= 400
    assert root.find(f"{SVG}title").text
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for kind in {*re.findall(r'class="([^"]+)"', text)} - {"name", "title"}:
        assert f".{kind} {{" in light
        assert f".{kind} {{" in dark


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_no_text_leaves_its_picture(picture):
    root = ElementTree.parse(picture).getroot()
    for text in root.iter(f"{SVG}text"):
        wide = 7.9 * len(text.text) if text.get("class") == "name" else 6.9 * len(text.text)
        left = (
            float(text.get("x"))
            - {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")] * wide
        )
        assert left >= 0
        assert left + wide <= int(root.get("width"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_page_shows_each_picture_with_a_text_for_it(picture):
    pages = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md"))
    (shown,) = re.findall(rf"!\[([^\]]+)\]\({picture.name}\)", pages)
    assert len(shown) > 100


def test_results_that_change_change_the_plot(tool, monkeypatch):
    before = tool["draw_overhead"]()
    globals_ = tool["draw_overhead"].__globals__
    monkeypatch.setitem(globals_, "find_overhead", lambda label: {"torch": 0.5})
    assert tool["draw_overhead"]() != before
