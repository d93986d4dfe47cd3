"""A fork while another thread holds a lock of ours leaves the child able to work."""

import ast
import importlib.util
from pathlib import Path

import pytest
from processes import BUILT_IN, make_backend, run_python

# Forks while another thread is in ``held``, and shows what the child's work came to.
FORKING = """
    import os, signal, threading, time
    import d2ldev
    backend = d2ldev.get_backend("reference")
    inside, leave = threading.Event(), threading.Event()
    {setup}
    def hold():
        with held:
            inside.set()
            leave.wait(60)
    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        {work}
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join()
    show(os.waitstatus_to_exitcode(status))
    {work}
    show("the parent works, too")
"""
HELD = {
    "the registry": (
        "from d2ldev.registry import selection; selection._lock._patience = 1; "
        "held = selection._lock",
        "d2ldev.set_backend('reference'); d2ldev.get_backend('REFERENCE')",
    ),
    "strict": (
        "from d2ldev._backend import framework_of; "
        "held = framework_of(backend).state.strictness._lock",
        "backend.strict().__enter__()",
    ),
    "a log": (
        "log = d2ldev.DeviceLog(backend); held = log._lock",
        "log.add(loss=1.0); assert log.last() == {'loss': 1.0}",
    ),
}


@pytest.mark.parametrize(("setup", "work"), HELD.values(), ids=HELD.keys())
def test_a_fork_while_another_thread_holds_a_lock_leaves_the_child_able_to_work(setup, work):
    assert run_python(FORKING.format(setup=setup, work=work)) == [0, "the parent works, too"]


def test_a_fork_inside_of_a_lock_leaves_it_to_the_child_as_well():
    code = """
        import os, signal, threading
        from d2ldev.locks import Lock
        lock = Lock()
        with lock:
            child = os.fork()
        if not child:
            signal.alarm(20)
            thread = threading.Thread(target=lock.__enter__)
            thread.start()
            thread.join()
            os._exit(0)
        show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code) == [0]


def test_a_fork_while_another_thread_imports_a_backend_leaves_the_child_able_to_use_it(tmp_path):
    slow = "import time\ntime.sleep(2)\nfrom d2ldev_reference import ReferenceFramework\n"
    make_backend(tmp_path, source=f"{slow}class MyFramework(ReferenceFramework): name = 'mine'")
    code = """
        import os, signal, threading, time
        import d2ldev
        thread = threading.Thread(target=d2ldev.get_backend, args=("mine",))
        thread.start()
        time.sleep(0.5)
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(d2ldev.get_backend("mine").name != "mine")
        show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        thread.join()
    """
    assert run_python(code, path=[tmp_path]) == [0]


def test_a_fork_while_another_thread_uses_d2ldev_for_the_first_time_leaves_the_child_able_to_work():
    code = """
        import os, signal, sys, threading, time
        import d2ldev
        class Slow:
            def find_spec(self, name, *_):
                if name in ("d2ldev.active", "d2ldev_reference"):
                    inside.set()
                    time.sleep(0.5)
        inside = threading.Event()
        sys.meta_path.insert(0, Slow())
        thread = threading.Thread(target=lambda: d2ldev.backend.num_gpus())
        thread.start()
        inside.wait(60)
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(d2ldev.backend.name != "reference")
        show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        thread.join()
    """
    assert run_python(code, environment={"D2LDEV_BACKEND": "reference"}) == [0]


def test_a_fork_waits_for_a_lock_that_is_made_while_it_waits_for_another():
    code = """
        import os, threading, time
        from d2ldev.locks import Lock
        first, inside, held, done = Lock(patience=30), threading.Event(), threading.Event(), []
        def use(lock):
            with lock:
                held.set()
                time.sleep(0.5)
                done.append(True)
        def make():
            with first:
                inside.set()
                time.sleep(0.5)
                threading.Thread(target=use, args=(Lock(patience=30),)).start()
                held.wait(60)
        threading.Thread(target=make).start()
        inside.wait(60)
        child = os.fork()
        if not child:
            os._exit(not done)
        show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code) == [0]


def test_threads_that_fork_at_once_leave_no_lock_locked():
    code = """
        import os, signal, threading
        import d2ldev
        backend = d2ldev.get_backend("reference")
        ended = []
        def fork():
            for _ in range(20):
                child = os.fork()
                if not child:
                    signal.alarm(20)
                    d2ldev.set_backend("reference")
                    with backend.strict():
                        os._exit(0)
                ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        threads = [threading.Thread(target=fork) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        with backend.strict():
            show([len(ended), sum(ended)])
    """
    assert run_python(code) == [[80, 0]]


@pytest.mark.parametrize("package", ["core", *BUILT_IN])
def test_there_is_no_other_kind_of_lock(package):
    module = "d2ldev" if package == "core" else f"d2ldev_{package}"
    folder = Path(importlib.util.find_spec(module).origin).parent
    others = [
        f"{file.name}:{node.lineno}"
        for file in folder.rglob("*.py")
        if file.name != "locks.py"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock", "Condition")
    ]
    assert others == []
