"""The plugin of ``pytest --d2ldev-leaks`` before the first test of a run."""

import pytest
from processes import run_python

PROGRAM = """
import sys
import pytest

class Looking:
    def pytest_collection_finish(self):
        show([name for name in {names} if name in sys.modules])

options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", {folder!r}]
# By name: an environment may announce the plugin, and pytest loads it once.
options += ["-p", "no:d2ldev_leaks", "-p", "no:d2ldev_conformance", "-p", "d2ldev.leaks.plugin"]
show(pytest.main([*options, *{options}, {folder!r}], plugins=[Looking()]))
"""
NAMES = ["torch", "jax", "numpy", "d2ldev._backend", "d2ldev.leaks.finding"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], []), (["--d2ldev-leaks", "--collect-only"], [])],
    ids=["without", "with"],
)
def test_collecting_imports_no_framework(tmp_path, options, expected):
    (tmp_path / "test_empty.py").write_text("def test_empty():\n    pass\n")
    program = PROGRAM.format(names=NAMES, folder=str(tmp_path), options=options)
    found, status = run_python(program, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert status == 0
    assert found == expected
