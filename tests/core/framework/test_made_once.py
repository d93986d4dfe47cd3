"""A property that is made at its first use."""

from processes import run_python

# Another thread is making what a framework makes at its first use; ``go`` lets it end.
MAKING = """
    import os, signal, threading
    import d2ldev
    from d2ldev_reference import ReferenceFramework
    class Framework(ReferenceFramework):
        @property
        def strict(self):
            if threading.current_thread() is thread:
                making.set()
                go.wait(60)
            return self.room
        @strict.setter
        def strict(self, room):
            self.room = room
    framework, making, go, made = Framework(), threading.Event(), threading.Event(), []
    thread = threading.Thread(target=lambda: made.append(framework.strictness))
    thread.start()
    making.wait(60)
"""


def test_a_fork_while_another_thread_makes_what_is_made_once_leaves_the_child_able_to_work():
    code = """
    child = os.fork()
    if not child:
        signal.alarm(20)
        with framework.strictness.block():
            os._exit(0)
    go.set()
    show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(MAKING + code) == [0]


def test_two_threads_that_make_what_is_made_once_get_the_same_object():
    code = """
    threading.Timer(0.5, go.set).start()
    mine = framework.strictness
    thread.join()
    show(made == [mine])
    """
    assert run_python(MAKING + code) == [True]
