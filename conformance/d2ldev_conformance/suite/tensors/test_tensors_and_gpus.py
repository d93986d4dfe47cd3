"""D2L 6.7.2, "Tensors and GPUs": asking a tensor where it is, and for its values.

Programs decide by the answers about a tensor. A wrong device, dtype or value in an answer is not
noticed by the framework.
"""

from __future__ import annotations

import copy
import operator
import pickle
from contextlib import suppress

import numpy as np
import pytest

import d2ldev
from d2ldev import Device, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, make_aligned, numbers

SECTION = "6.7.2"
SOURCE = "contract"


@requirement("query.device-is-a-device", section=SECTION, source="D2L")
def test_the_device_of_a_tensor_is_the_interned_one(backend, place):
    """Return one ``Device`` object for each device, so that ``is`` compares them."""
    assert backend.device_of(backend.ones((2, 3), device=place)) is place


@requirement("query.device-of-no-tensor", section=SECTION)
@pytest.mark.parametrize("value", [1.0, "x", None, [1.0], np.zeros(2), Device("cpu")])
def test_an_object_that_is_not_a_tensor_has_no_device(backend, value):
    """Refuse to name the device of an object that is not a tensor.

    A NumPy array on ``'cpu'`` looks like a tensor, and is foreign to the framework.
    """
    with pytest.raises(UnsupportedValueError):
        backend.device_of(value)


@requirement("query.dtype-and-address-of-no-tensor", section=SECTION)
@pytest.mark.parametrize("value", [1.0, "x", None, [1.0], np.zeros(2), np.float32])
def test_an_object_that_is_not_a_tensor_has_no_dtype_and_no_address(backend, value):
    """Refuse to name the dtype or the address of an object that is not a tensor.

    A number has no memory, and a list has no dtype.
    """
    for method in (backend.dtype_of, backend.address):
        with pytest.raises(UnsupportedValueError):
            method(value)


# What some framework refuses.
OPERATIONS = {
    "for row in x": list,
    "x[0]": lambda x: [x[0]],
    "x[:1]": lambda x: [x[:1]],
    "x[..., 0]": lambda x: [x[..., 0]],
    "x[None]": lambda x: [x[None]],
    "x[x > 0.5]": lambda x: [x[x > 0.5]],
    "abs(x)": lambda x: [abs(x)],
    "x == 1.0": lambda x: [x == 1.0],
    "x.T": lambda x: [x.T],
    "x += 1.0": lambda x: [operator.iadd(x, 1.0)],
}


@requirement("query.result-is-where-the-operands-are", section=SECTION, source="D2L")
def test_an_operation_runs_where_its_operands_are(backend, place):
    """Leave the result of an operation on the device of its operands.

    Operations are arithmetic, comparisons, indexing and iteration over rows. The framework may
    refuse some of them, on the CPU, too.
    """
    x = backend.ones((3, 3), device=place)
    results = [x + x, x * 2.0, x @ x, -x, x[0, :], x + 1, x > 0.5]
    assert [backend.device_of(result) for result in results] == [place] * len(results)
    accepted = {}
    for name, operate in OPERATIONS.items():
        with suppress(Exception):
            operate(backend.ones((3, 3), device="cpu"))
            accepted[name] = operate
    found = {
        name: {backend.device_of(result) for result in operate(x)}
        for name, operate in accepted.items()
    }
    assert found == {name: {place} for name in accepted}


@requirement("query.result-is-right", section=SECTION)
def test_an_operation_computes_on_every_device(backend, place):
    """Compute a product and a sum correctly on each device."""
    x = backend.full((4, 4), 0.5, device=place)
    np.testing.assert_array_equal(backend.to_numpy(x @ x + x), np.full((4, 4), 1.5, np.float32))


@requirement("query.dtype-name", section=SECTION, source="array API, data types")
def test_the_dtype_of_a_tensor_has_a_name(backend, dtype):
    """Return the name of a tensor's dtype, in the array API's spelling."""
    assert backend.dtype_of(backend.asarray(numbers(dtype))) == dtype


@requirement("query.native-type", section=SECTION)
def test_a_tensor_is_the_frameworks_own(backend, place):
    """Return tensors of the framework's own class, without a wrapper.

    All of the framework's functions work on them.
    """
    x = backend.ones(2, device=place)
    assert isinstance(x, framework_of(backend).tensors.types)
    assert not type(x).__module__.startswith("d2ldev.")


@requirement("query.backend-of-a-tensor", section=SECTION, source="contract, Which backend")
def test_backend_of_finds_the_backend_of_a_tensor(backend, place):
    """Find the backend of a tensor by ``backend_of``.

    A library that is given a tensor works in its framework.
    """
    assert d2ldev.backend_of(backend.ones(1, device=place)) is backend


@requirement("query.to-numpy-values", section=SECTION)
def test_to_numpy_gives_the_values(backend, dtype, place):
    """Return each value of each dtype from ``to_numpy``, from each device."""
    data = numbers(dtype)
    assert_same(backend.to_numpy(backend.asarray(data, device=place)), data)


@requirement("query.to-numpy-shapes", section=SECTION)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1, 1, 1), (7,)])
def test_to_numpy_keeps_the_shape(backend, place, shape):
    """Keep the shape in ``to_numpy``, also without axes or without elements."""
    data = numbers("float32", shape)
    assert_same(backend.to_numpy(backend.asarray(data, device=place)), data)


@requirement("query.to-numpy-of-parts", section=SECTION)
def test_a_part_of_a_tensor_has_its_own_values(backend, place):
    """Return the values of a slice from ``to_numpy`` and from ``copy``.

    A view has the memory of the whole tensor below it.
    """
    data = numbers("float32", (4, 6))
    x = backend.asarray(data, device=place)
    for part in (np.s_[1:3, 2:5], np.s_[:, ::2], np.s_[:, 1]):
        expected = np.ascontiguousarray(data[part])
        assert_same(np.ascontiguousarray(backend.to_numpy(x[part])), expected)
        assert_same(np.ascontiguousarray(backend.to_numpy(backend.copy(x[part]))), expected)


@requirement("query.to-numpy-is-owned", section=SECTION)
def test_the_array_is_the_callers_own(backend, place):
    """Return from ``to_numpy`` a writable array that shares no memory.

    Some frameworks return a read-only view of the tensor.
    """
    x = backend.ones(3, device=place)
    array = backend.to_numpy(x)
    assert type(array) is np.ndarray
    assert array.flags.writeable
    array[:] = 7.0
    np.testing.assert_array_equal(backend.to_numpy(x), np.ones(3, np.float32))


@requirement("query.to-numpy-of-no-tensor", section=SECTION)
@pytest.mark.parametrize("value", [1.0, None, [1.0], np.zeros(2)])
def test_to_numpy_refuses_an_object_that_is_not_a_tensor(backend, value):
    """Refuse in ``to_numpy`` an object that is not a tensor.

    Such a call is a mistake in the caller's types.
    """
    with pytest.raises(UnsupportedValueError):
        backend.to_numpy(value)


@requirement("query.address", section=SECTION)
def test_the_address_of_a_tensor_is_its_own(backend, place):
    """Return the same address for one tensor, and another for another tensor.

    Tests of shared memory compare addresses.
    """
    x, y = backend.ones(16, device=place), backend.ones(16, device=place)
    assert backend.address(x) == backend.address(x)
    assert backend.address(x) != backend.address(y)


@requirement("query.norm-is-a-scalar", section="6.7.5", source="D2L")
def test_the_norm_of_a_matrix_is_a_scalar_where_the_matrix_is(backend, place):
    """Return the root of the sum of squares from ``Tensors.norm``, a scalar on the device.

    The book's exercises log the norms of products, and compare the times.
    """
    x = backend.asarray(np.array([[1, -2], [2, 4]], "float32"), device=place)
    found = framework_of(backend).tensors.norm(x)
    assert backend.device_of(found) is place
    np.testing.assert_allclose(backend.to_numpy(found), np.float32(5), rtol=1e-6)
    assert tuple(found.shape) == ()


@requirement("query.dlpack-shares-numpy-memory", section=SECTION, source="DLPack")
def test_from_dlpack_takes_over_numpy_memory(backend):
    """Take over NumPy's memory in ``from_dlpack`` without a copy."""
    data = make_aligned(4, 64)
    x = backend.from_dlpack(data)
    assert backend.device_of(x) is backend.cpu()
    assert backend.address(x) == data.ctypes.data


@requirement("query.dlpack-of-its-own", section=SECTION, source="DLPack")
def test_from_dlpack_takes_the_backends_own_tensors(backend):
    """Take the backend's own tensors in ``from_dlpack``, on the same memory.

    Code for any framework does not ask for the framework first.
    """
    x = backend.arange(4, dtype="float32")
    y = backend.from_dlpack(x)
    np.testing.assert_array_equal(backend.to_numpy(y), np.arange(4, dtype=np.float32))
    assert backend.address(y) == backend.address(x)


@requirement("query.dlpack-stays-on-the-device", section=SECTION, source="DLPack")
@pytest.mark.needs_gpus(1)
def test_from_dlpack_leaves_a_tensor_where_it_is(backend, place):
    """Leave a tensor of a GPU there in ``from_dlpack``.

    An exchange through the host would copy twice.
    """
    y = backend.from_dlpack(backend.ones(4, device=place))
    assert backend.device_of(y) is place
    np.testing.assert_array_equal(backend.to_numpy(y), np.ones(4, np.float32))


@requirement("query.dlpack-to-a-device", section=SECTION, source="DLPack")
def test_from_dlpack_copies_to_another_device(backend, place):
    """Copy in ``from_dlpack`` to the given device with ``copy=True``."""
    data = np.arange(4, dtype="float32")
    x = backend.from_dlpack(data, device=place, copy=True)
    assert backend.device_of(x) is place
    data[:] = 0
    np.testing.assert_array_equal(backend.to_numpy(x), np.arange(4, dtype=np.float32))


@requirement("query.dlpack-copies", section=SECTION, source="DLPack")
def test_from_dlpack_copies_to_the_requested_device(backend, place):
    """Return new memory from ``from_dlpack`` with ``copy=True``, on the same device.

    The owner of the old memory may write to it.
    """
    x = backend.ones(16, device=place)
    y = backend.from_dlpack(x, copy=True)
    assert backend.device_of(y) is place
    assert backend.address(y) != backend.address(x)
    np.testing.assert_array_equal(backend.to_numpy(y), np.ones(16, np.float32))


@requirement("query.dlpack-copies-what-it-cannot-share", section=SECTION, source="DLPack")
def test_from_dlpack_copies_memory_that_it_cannot_share(backend):
    """Copy memory that is read-only or reversed with ``copy=True``.

    The exchange itself refuses such memory.
    """
    data = np.arange(4, dtype="float32")
    data.flags.writeable = False
    x = backend.from_dlpack(data[::-1], copy=True)
    np.testing.assert_array_equal(backend.to_numpy(x), data[::-1])


@requirement("query.dlpack-without-a-copy", section=SECTION, source="DLPack")
@pytest.mark.needs("dlpack")
@pytest.mark.needs_gpus(1)
def test_from_dlpack_refuses_a_copy_that_it_may_not_make(backend):
    """Refuse ``copy=False`` in ``from_dlpack`` if the device is another one.

    Two devices share no memory.
    """
    with pytest.raises(UnsupportedValueError, match="copy=False"):
        backend.from_dlpack(make_aligned(4, 64), device="gpu:0", copy=False)


@requirement("query.dlpack-refuses-others", section=SECTION, source="DLPack")
@pytest.mark.needs("dlpack")
@pytest.mark.parametrize("value", [1.0, [1.0], "x", None])
def test_from_dlpack_refuses_an_object_without_dlpack(backend, value):
    """Refuse in ``from_dlpack`` an object without DLPack.

    A list has no memory that can be shared.
    """
    with pytest.raises(UnsupportedValueError):
        backend.from_dlpack(value)


@requirement("query.dlpack-refuses-others", section=SECTION, source="DLPack")
@pytest.mark.needs("dlpack")
def test_from_dlpack_refuses_text_that_it_is_to_copy(backend):
    """Refuse text in ``from_dlpack``, also with ``copy=True``.

    DLPack has no dtype for text.
    """
    with pytest.raises(UnsupportedValueError):
        backend.from_dlpack(np.array(["text"]), copy=True)


@requirement(
    "errors.say-what-where-and-how", section=SECTION, source="contract, Containers and errors"
)
def test_an_error_names_the_attempt_the_devices_and_the_fix(backend, missing):
    """Name in an error the attempt, the devices, and the line that fixes it.

    A reader should not have to look for the cause.
    """
    with pytest.raises(d2ldev.DeviceUnavailableError) as caught:
        backend.to(backend.ones(1), missing)
    error = caught.value
    assert str(missing) in error.attempted
    assert error.devices == tuple(map(str, backend.devices()))
    assert f"try_gpu({missing.index})" in error.fix
    assert all(text in str(error) for text in (error.attempted, error.problem, error.fix))


@requirement("errors.keep-the-cause", section=SECTION, source="contract, Containers and errors")
def test_the_frameworks_own_error_stays_chained(backend, monkeypatch):
    """Keep the framework's own error as the cause of d2ldev's.

    It has the details that a bug report needs.

    Let a call of the framework fail that every framework has.
    """
    error = ArithmeticError("the framework's own")

    def fail(*_):
        raise error

    monkeypatch.setattr(framework_of(backend).tensors, "full", fail)
    with pytest.raises(UnsupportedValueError) as caught:
        backend.full((2,), 1.0)
    assert caught.value.__cause__ is error


@requirement("query.dlpack-refuses-others", section=SECTION, source="DLPack")
@pytest.mark.needs("dlpack")
def test_the_error_of_an_exchange_stays_chained(backend):
    """Keep the exporter's own error as the cause of a refused exchange.

    Only the exporter knows why it cannot share.
    """
    with pytest.raises(UnsupportedValueError) as caught:
        backend.from_dlpack(1.0)
    assert isinstance(caught.value.__cause__, Exception)
    assert not isinstance(caught.value.__cause__, d2ldev.D2LDevError)


@requirement("errors.survive-pickling", section=SECTION, source="Python, pickle")
def test_an_error_reaches_another_process_whole(backend, missing):
    """Keep type and text of an error through pickling.

    Errors of worker processes reach the user in this way.
    """
    with pytest.raises(d2ldev.DeviceUnavailableError) as caught:
        backend.zeros(1, device=missing)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)


@requirement("query.backend-is-one-object", section=SECTION, source="contract, Which backend")
def test_a_backend_is_one_object(backend):
    """Return one object for one backend, in any case of its name.

    Two objects would keep two states.
    """
    assert d2ldev.get_backend(backend.name) is backend
    assert d2ldev.get_backend(f" {backend.name.upper()} ") is backend
    assert copy.copy(d2ldev.backend) is d2ldev.backend
