"""A program that runs in a checkout uses nothing of an installed wheel."""

import shutil
from pathlib import Path

import d2ldev_conformance
import d2ldev_reference
import pytest
from processes import make_package, run_python

import d2ldev


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


def test_all_packages_are_the_checkout_s(checkout, tmp_path):
    wheel = tmp_path / "wheel"
    for name in ("d2ldev", "d2ldev_reference", "d2ldev_conformance"):
        make_package(wheel, name, "raise ImportError('of the wheel')")
    found = run_python(
        """
        import d2ldev
        d2ldev.get_backend("reference")
        import d2ldev_conformance, d2ldev_reference
        for package in (d2ldev, d2ldev_reference, d2ldev_conformance):
            show(package.__file__)
        """,
        path=[wheel],
        folder=checkout,
    )
    assert [Path(file).is_relative_to(checkout) for file in found] == [True] * 3


def test_what_pytest_imports_of_a_wheel_before_anything_else_is_the_checkout_s(checkout, tmp_path):
    wheel = tmp_path / "wheel"
    source = (checkout / "conformance" / "d2ldev_conformance" / "__init__.py").read_text("utf-8")
    make_package(wheel, "d2ldev_conformance", source)
    (wheel / "d2ldev_conformance" / "plugin.py").write_text("raise ImportError('of the wheel')")
    found = run_python(
        """
        import d2ldev_conformance.plugin
        show(d2ldev_conformance.plugin.__file__)
        """,
        path=[wheel],
        folder=checkout,
    )
    assert [Path(file).is_relative_to(checkout) for file in found] == [True]
