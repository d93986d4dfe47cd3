"""``from d2ldev import backend``: the handle is a backend, and always the active one."""

import copy
import pickle

import pytest
from processes import run_python

import d2ldev
from d2ldev import Backend, backend


def test_the_handle_is_a_backend():
    assert isinstance(backend, Backend)


def test_the_handle_follows_the_scope(other):
    with d2ldev.use_backend(other):
        inside = backend.num_gpus()
    assert (inside, backend.num_gpus()) == (1, 2)


def test_the_handle_follows_set_backend(restored_backend, other):
    d2ldev.set_backend(other)
    assert backend.num_gpus() == 1


def test_a_bound_method_that_was_kept_follows_too(other):
    num_gpus = backend.num_gpus
    with d2ldev.use_backend(other):
        assert num_gpus() == 1


def test_on_makes_the_place_of_new_tensors():
    with backend.on("gpu:1") as device:
        assert backend.device_of(backend.zeros(1)) is device


def test_the_handle_has_the_attributes_of_the_active_backend(reference):
    assert (backend.name, backend.dtype_names) == ("reference", reference.dtype_names)


def test_an_attribute_that_no_backend_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        backend.no_such_thing  # noqa: B018


def test_no_attribute_of_the_handle_can_be_set():
    with pytest.raises(AttributeError, match="num_gpus"):
        backend.num_gpus = lambda: 8


def test_dir_lists_what_the_active_backend_has(reference):
    assert dir(backend) == dir(reference)


def test_repr_names_the_active_backend():
    assert repr(backend) == "<the active backend: reference>"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_of_the_handle_is_the_handle(copied):
    assert copied(backend) is backend


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_handle_comes_back_as_the_handle(protocol):
    assert pickle.loads(pickle.dumps(backend, protocol)) is backend


def test_a_pickled_handle_is_the_active_backend_of_the_process_that_reads_it():
    code = f"""
        import pickle
        handle = pickle.loads(bytes.fromhex({pickle.dumps(backend).hex()!r}))
        show(handle.num_gpus())
    """
    environment = {"D2LDEV_BACKEND": "reference", "D2LDEV_VIRTUAL_GPUS": "1"}
    assert run_python(code, environment=environment) == [1]


# In processes of their own: here a block was entered before, and the handle keeps nothing any more.


def test_the_handle_that_was_used_follows_set_backend(install):
    code = """
        import d2ldev
        d2ldev.set_backend("reference")
        for name in ("torch", "reference"):
            d2ldev.backend.num_gpus()
            d2ldev.set_backend(name)
            show(d2ldev.backend.name)
    """
    assert run_python(code, path=[install("torch")]) == ["torch", "reference"]


def test_the_handle_that_was_used_follows_the_first_block_in_its_thread_only(install):
    code = """
        import threading
        import d2ldev
        d2ldev.set_backend("reference")
        d2ldev.backend.num_gpus()
        entered, leave = threading.Event(), threading.Event()
        def enter():
            with d2ldev.use_backend("torch"):
                entered.set()
                leave.wait()
                show(d2ldev.backend.name)
        thread = threading.Thread(target=enter)
        thread.start()
        entered.wait()
        show(d2ldev.backend.name)
        leave.set()
        thread.join()
        show(d2ldev.backend.name)
    """
    assert run_python(code, path=[install("torch")]) == ["reference", "torch", "reference"]


def test_the_handle_in_a_task_that_outlives_the_first_block_keeps_the_blocks_backend(install):
    code = """
        import contextvars
        import d2ldev
        d2ldev.set_backend("reference")
        d2ldev.backend.num_gpus()
        with d2ldev.use_backend("torch"):
            context = contextvars.copy_context()
        show(d2ldev.backend.name)
        show(context.run(lambda: d2ldev.backend.name))
        show(d2ldev.backend.name)
    """
    assert run_python(code, path=[install("torch")]) == ["reference", "torch", "reference"]


@pytest.mark.parametrize("function", [d2ldev.get_backend, d2ldev.set_backend])
def test_the_handle_given_as_a_backend_is_the_active_one(restored_backend, reference, function):
    assert function(backend) is reference
    assert backend.num_gpus() == 2


def test_the_handle_given_to_use_backend_is_the_active_one(reference):
    with d2ldev.use_backend(backend) as entered:
        assert entered is reference
        assert backend.num_gpus() == 2
