"""``import d2ldev`` changes nothing in the interpreter, and takes little time."""

import json

from processes import FRAMEWORKS, run_interpreter, run_python

BUDGET = 0.015
"""Seconds of computing that ``import d2ldev`` may take."""

STATE = """
import os, signal, sys, threading, warnings

def state():
    return {
        "finders": [repr(finder) for finder in sys.meta_path],
        "path": list(sys.path),
        "hooks of the path": len(sys.path_hooks),
        "warnings": repr(warnings.filters),
        "their function": repr(warnings.showwarning),
        "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "variables": dict(os.environ),
        "errors of threads": repr(threading.excepthook),
        "errors": repr([sys.excepthook, sys.unraisablehook, sys.displayhook]),
        "threads": threading.active_count(),
        "trace": repr([sys.gettrace(), sys.getprofile()]),
        "folder": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
        "switches": sys.getswitchinterval(),
    }
"""


def test_nothing_of_the_interpreter_is_changed():
    code = f"""{STATE}
before = state()
import d2ldev
after = state()
show([name for name in before if before[name] != after[name]])
"""
    assert run_python(code, hide=()) == [[]]


def test_only_the_standard_library_is_imported():
    code = """
        import sys
        before = {*sys.modules}
        import d2ldev
        packages = {name.partition(".")[0] for name in {*sys.modules} - before}
        show(sorted(packages - sys.stdlib_module_names))
    """
    assert run_python(code, hide=()) == [["d2ldev"]]


def test_no_framework_is_imported():
    code = f"import sys, d2ldev; show(sorted({{*{FRAMEWORKS}}} & sys.modules.keys()))"
    assert run_python(code, hide=()) == [[]]


def test_the_time_is_within_the_budget():
    code = (
        "import time; begin = time.process_time(); import d2ldev; "
        "print(time.process_time() - begin)"
    )
    # The least of several: another process may have emptied the caches.
    assert min(json.loads(run_interpreter("-c", code).stdout) for _ in range(5)) < BUDGET
