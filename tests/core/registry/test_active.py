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


@pytest.mark.parametrize("function", [d2ldev.get_backend, d2ldev.set_backend])
def test_the_handle_given_as_a_backend_is_the_active_one(restored_backend, reference, function):
    assert function(backend) is reference
    assert backend.num_gpus() == 2


def test_the_handle_given_to_use_backend_is_the_active_one(reference):
    with d2ldev.use_backend(backend) as entered:
        assert entered is reference
        assert backend.num_gpus() == 2
