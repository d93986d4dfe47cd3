"""A program that has the folders of a checkout on its path uses nothing of an installed wheel."""

import shutil
import tomllib
from pathlib import Path

import d2ldev_conformance
import d2ldev_reference
import pytest
from processes import make_package, run_python

import d2ldev

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path):
    """A checkout, with the packages where they are in one."""
    folder = tmp_path / "checkout"
    for package, where in (
        (d2ldev, "."),
        (d2ldev_reference, "backends"),
        (d2ldev_conformance, "conformance"),
    ):
        (source,) = package.__path__
        shutil.copytree(source, folder / where / Path(source).name)
    return folder


@pytest.fixture
def wheel(tmp_path):
    """A folder of installed packages, none of which is to be imported."""
    folder = tmp_path / "wheel"
    for name in ("d2ldev", "d2ldev_reference", "d2ldev_conformance"):
        make_package(folder, name, "raise ImportError('of the wheel')")
    return folder


def test_an_editable_installation_finds_every_package_of_the_wheel():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    parents = {str(Path(package).parent) for package in build["targets"]["wheel"]["packages"]}
    assert parents == {*build["dev-mode-dirs"]}


def test_all_packages_are_those_of_the_folders_on_the_path(checkout, wheel):
    found = run_python(
        """
        import d2ldev
        d2ldev.get_backend("reference")
        import d2ldev_conformance, d2ldev_reference
        for package in (d2ldev, d2ldev_reference, d2ldev_conformance):
            show(package.__file__)
        """,
        path=[checkout, checkout / "backends", checkout / "conformance", wheel],
    )
    assert [Path(file).is_relative_to(checkout) for file in found] == [True] * 3
