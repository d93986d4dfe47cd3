"""D2L 6.7.2.1, "Storage on the GPU": tensors made on a device, with no detour.

Tensors are made in the same way on each framework. Their device and dtype follow from the call, and
no value changes on the way.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import DeviceUnavailableError, OutOfDeviceMemoryError, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import (
    assert_same,
    creators,
    fail_if_called,
    make_aligned,
    numbers,
)
from d2ldev_conformance.suite.tensors import hostile

SECTION = "6.7.2.1"
SOURCE = "array API, creation functions"


@requirement("create.on-the-device", section=SECTION, source="array API, device support")
@creators
def test_a_tensor_is_made_where_it_is_wanted(backend, place, make):
    """Make a tensor on the device of the argument, with each creation function."""
    assert backend.device_of(make(backend, device=place)) is place


@requirement("create.empty-on-the-device", section=SECTION, source="array API, device support")
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
def test_a_tensor_without_elements_is_made_where_it_is_wanted(backend, place, name, shape):
    """Make tensors without elements on the given device, too.

    Backends skip empty tensors, and leave them on the CPU.
    """
    x = getattr(backend, name)(shape, device=place)
    made = [x, backend.full(shape, 7.0, device=place), backend.full_like(x, 7.0)]
    made += [backend.asarray(np.zeros(shape, "float32"), device=place), backend.copy(x)]
    made += [backend.arange(0, device=place), backend.to(backend.zeros(shape, device="cpu"), place)]
    assert [backend.device_of(each) for each in made] == [place] * len(made)


@requirement("create.without-a-copy", section=SECTION, source="D2L")
@creators
def test_no_tensor_is_made_on_another_device_and_copied(backend, place, make, monkeypatch):
    """Make a tensor on the device itself, without a copy from elsewhere.

    A detour costs the memory twice and the transfer.
    """
    monkeypatch.setattr(framework_of(backend).tensors, "transfer", fail_if_called)
    assert backend.device_of(make(backend, device=place)) is place


@requirement("create.on-a-missing-device", section=SECTION, source="contract")
@creators
def test_a_missing_device_is_an_error_and_never_the_cpu(backend, make, missing):
    """Refuse to make a tensor on a missing device, and do not use the CPU.

    A silent fallback shows only in the time of a training.
    """
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        make(backend, device=missing)


@requirement("create.like-gives-device-and-dtype", section=SECTION, source="contract")
def test_like_gives_device_and_dtype(backend, place, other_float):
    """Take device and dtype from the tensor given as ``like=``.

    Code for new tensors beside given ones names neither.
    """
    like = backend.zeros(1, dtype=other_float, device=place)
    made = [backend.ones(2, like=like), backend.asarray([1, 2], like=like)]
    made += [
        backend.rand(2, like=like),
        backend.full(2, 3, like=like),
        backend.arange(3, like=like),
    ]
    assert [backend.device_of(x) for x in made] == [place] * len(made)
    assert {backend.dtype_of(x) for x in made} == {other_float}


@requirement("create.like-is-only-a-default", section=SECTION, source="contract")
def test_explicit_arguments_override_like(backend, place):
    """Prefer explicit ``device=`` and ``dtype=`` over those of ``like=``."""
    like = backend.zeros(1, dtype="int8", device="cpu")
    x = backend.ones(2, like=like, device=place, dtype="int32")
    assert (backend.device_of(x), backend.dtype_of(x)) == (place, "int32")


@requirement("create.zeros-and-ones", section=SECTION)
def test_zeros_and_ones_have_their_values(backend, place):
    """Fill ``zeros`` and ``ones`` with 0 and 1, in float32."""
    assert_same(backend.to_numpy(backend.zeros((2, 3), device=place)), np.zeros((2, 3), "float32"))
    assert_same(backend.to_numpy(backend.ones((2, 3), device=place)), np.ones((2, 3), "float32"))


@requirement("create.empty", section=SECTION)
def test_empty_has_the_shape_dtype_and_device_that_it_was_asked_for(backend, place, other_float):
    """Give ``empty`` the shape, dtype and device that were asked for, float32 by default."""
    x = backend.empty((2, 0, 3), dtype=other_float, device=place)
    assert backend.to_numpy(x).shape == (2, 0, 3)
    assert (backend.device_of(x), backend.dtype_of(x)) == (place, other_float)
    assert backend.dtype_of(backend.empty(2)) == "float32"


_LIKE = {
    "zeros_like": lambda backend, x, **options: backend.zeros_like(x, **options),
    "ones_like": lambda backend, x, **options: backend.ones_like(x, **options),
    "full_like": lambda backend, x, **options: backend.full_like(x, 3, **options),
    "empty_like": lambda backend, x, **options: backend.empty_like(x, **options),
}
likes = pytest.mark.parametrize("make_like", _LIKE.values(), ids=_LIKE)


@requirement("create.like-another-tensor", section=SECTION, source="array API, device support")
@likes
def test_a_tensor_like_another_one_has_its_shape_dtype_and_device(
    backend, place, other_float, make_like
):
    """Give ``zeros_like`` and its relatives the tensor's shape, dtype and device."""
    x = make_like(backend, backend.ones((2, 3), dtype=other_float, device=place))
    assert backend.to_numpy(x).shape == (2, 3)
    assert (backend.device_of(x), backend.dtype_of(x)) == (place, other_float)


@requirement("create.like-another-tensor-has-its-values", section=SECTION)
@pytest.mark.parametrize(("name", "value"), [("zeros_like", 0), ("ones_like", 1), ("full_like", 3)])
def test_a_tensor_like_another_one_has_the_values_that_its_name_says(backend, place, name, value):
    """Fill ``zeros_like``, ``ones_like`` and ``full_like`` with the value of the name."""
    x = _LIKE[name](backend, backend.arange(6, dtype="int32", device=place))
    assert_same(backend.to_numpy(x), np.full(6, value, "int32"))


@requirement("create.like-another-tensor-is-only-a-default", section=SECTION)
@likes
def test_explicit_arguments_override_the_tensor(backend, place, make_like):
    """Prefer explicit arguments of ``zeros_like`` over the tensor's properties."""
    x = make_like(backend, backend.ones((2, 3), device="cpu"), dtype="int32", device=place)
    assert (backend.device_of(x), backend.dtype_of(x)) == (place, "int32")


@requirement("create.like-another-tensor-needs-one", section=SECTION, source="contract")
@likes
@pytest.mark.parametrize("other", [None, 1.0, np.zeros(2, "float32"), [1.0]])
def test_like_functions_refuse_an_object_that_is_not_a_tensor(backend, make_like, other):
    """Refuse in ``zeros_like`` and its relatives an object that is not a tensor.

    A list has no device from which the result could take its own.
    """
    with pytest.raises(UnsupportedValueError):
        make_like(backend, other)


@requirement("create.full", section=SECTION)
def test_full_has_its_value(backend, place):
    """Fill ``full`` with the value."""
    x = backend.full((2, 2), -1.5, device=place)
    assert_same(backend.to_numpy(x), np.full((2, 2), -1.5, "float32"))


@requirement("create.arange", section=SECTION, source="NumPy, arange")
@pytest.mark.parametrize(
    "arguments",
    [(5,), (2, 7), (1, 10, 3), (5, 0, -2), (0,), (3, 1), (2**31 - 3, 2**31 + 5, 10)],
)
def test_arange_counts_as_numpy_does(backend, place, arguments):
    """Count in ``arange`` as NumPy does, with negative steps and at the end of int32."""
    x = backend.arange(*arguments, device=place, dtype="int32")
    assert_same(backend.to_numpy(x), np.arange(*arguments, dtype="int32"))


@requirement(
    "create.arange-of-every-dtype", section=SECTION, source="contract, Dtypes of new tensors"
)
@pytest.mark.parametrize("arguments", [(5,), (1, 9, 3), (5, 0, -2), (0,)])
def test_arange_counts_in_every_real_dtype(backend, place, arguments):
    """Count in ``arange`` in every real dtype of the backend.

    Frameworks lack kernels for some dtypes on some devices.
    """
    others = ("bool", "complex", "float8")
    for name in (name for name in backend.dtype_names if not name.startswith(others)):
        x = backend.arange(*arguments, dtype=name, device=place)
        assert backend.dtype_of(x) == name
        assert backend.device_of(x) is place
        assert backend.to_numpy(x).tolist() == list(range(*arguments))


@requirement("create.large-ranges", section=SECTION, source="contract, Dtypes of new tensors")
def test_arange_counts_large_integers_exactly(backend, place):
    """Count in ``arange`` exactly up to the end of each integer dtype.

    Some frameworks count in floats, which round large integers.
    """
    names = [name for name in backend.dtype_names if name.startswith(("int", "uint"))]
    for name in names:
        top = int(np.iinfo(name).max)
        for arguments in ((top - 3, top), (top, top - 5, -3), (0, top, top // 2)):
            x = backend.arange(*arguments, dtype=name, device=place)
            assert backend.device_of(x) is place
            assert backend.to_numpy(x).tolist() == list(range(*arguments))
    assert names


@requirement("create.arange-of-fractions", section=SECTION, source="NumPy, arange")
@pytest.mark.parametrize("arguments", [(0.5, 3.0, 0.5), (0, 1, 0.25), (2.5,), (1.5, 0.0, -0.5)])
def test_arange_counts_in_fractions(backend, place, arguments):
    """Count in ``arange`` in fractions, as NumPy does in float32."""
    x = backend.arange(*arguments, device=place)
    assert_same(backend.to_numpy(x), np.arange(*arguments, dtype="float32"))


@requirement("create.integers-are-exact", section=SECTION, source="array API, data types")
def test_no_integer_passes_through_a_float(backend, place):
    """Keep an integer that float32 cannot hold, in each creation function.

    An id of a user or a token would become another one.
    """
    odd = 2**24 + 1  # float32 has no such number
    made = [backend.full(1, odd, dtype="int32", device=place)]
    made += [backend.asarray([odd], device=place), backend.asarray(odd, device=place)]
    made += [backend.arange(odd, odd + 1, device=place)]
    assert [int(backend.to_numpy(x).ravel()[0]) for x in made] == [odd] * len(made)


@requirement("create.has-dtypes", section=SECTION, source="array API, data types")
def test_the_usual_dtypes_are_there(backend):
    """Provide bool, int32 and float32."""
    assert {"bool", "int32", "float32"} <= set(backend.dtype_names)


@requirement("create.every-dtype", section=SECTION, source="contract, Dtypes of new tensors")
def test_a_dtype_is_given_by_name(backend, dtype, place):
    """Make a tensor in each dtype that the backend names, on each device."""
    x = backend.ones((2, 3), dtype=dtype, device=place)
    assert backend.dtype_of(x) == dtype
    assert_same(backend.to_numpy(x), np.ones((2, 3), numbers(dtype).dtype))


@requirement("create.native-dtype", section=SECTION, source="contract")
def test_a_native_dtype_is_taken(backend, dtype):
    """Accept the framework's own dtype object for each dtype.

    Programs mix d2ldev's calls with the framework's own.
    """
    native = backend.dtype(dtype)
    assert backend.dtype(native) is native
    assert backend.dtype_of(backend.zeros(1, dtype=native)) == dtype


@requirement("create.dtype-of-a-tensor", section=SECTION, source="array API, asarray")
def test_the_dtype_of_a_tensor_is_taken(backend, dtype, place):
    """Accept ``x.dtype`` as a dtype, and return ``x`` itself in ``asarray``.

    ``dtype=x.dtype`` is the most common spelling in portable code.
    """
    x = backend.zeros(1, dtype=dtype, device=place)
    assert backend.dtype_of(backend.zeros(1, dtype=x.dtype)) == dtype
    assert backend.asarray(x, dtype=x.dtype) is x


@requirement("create.numpy-dtype", section=SECTION, source="contract")
def test_a_dtype_of_numpy_is_taken(backend):
    """Accept NumPy's dtypes and scalar types as a dtype.

    Data comes from NumPy with its dtype.
    """
    assert backend.dtype_of(backend.zeros(1, dtype=np.dtype("int32"))) == "int32"
    assert backend.dtype_of(backend.zeros(1, dtype=np.float32)) == "float32"
    assert backend.dtype_of(backend.zeros(1, dtype=np.bool_)) == "bool"


@requirement("create.unknown-dtype", section=SECTION, source="contract")
@pytest.mark.parametrize("value", ["float31", "", 7, object(), np.dtype("datetime64[s]")])
def test_an_unknown_dtype_is_refused(backend, value):
    """Refuse a dtype that the backend does not know.

    The default dtype instead would hide a misspelling.
    """
    with pytest.raises(UnsupportedValueError, match="dtype"):
        backend.zeros(1, dtype=value)


@requirement("create.default-dtype", section=SECTION, source="contract, Dtypes of new tensors")
def test_the_default_dtype_of_floats_is_float32(backend, place):
    """Give floats the dtype float32 unless another one is asked for."""
    made = [backend.zeros(1, device=place), backend.rand(1, device=place)]
    made += [backend.randn(1, device=place), backend.asarray([1.5], device=place)]
    made += [backend.full(1, 2.5, device=place), backend.arange(0.0, 1.0, 0.5, device=place)]
    assert [backend.dtype_of(x) for x in made] == ["float32"] * len(made)


@requirement("create.integers-stay-integers", section=SECTION, source="array API, asarray")
def test_integers_are_not_made_floats(backend, place):
    """Keep integers as integers in ``asarray``, ``arange`` and ``full``."""
    made = [backend.asarray([1, 2], device=place), backend.arange(3, device=place)]
    made += [backend.asarray(1, device=place), backend.full(2, 1, device=place)]
    assert all(backend.dtype_of(x) in ("int32", "int64") for x in made)


@requirement("create.default-integer-dtype", section=SECTION, source="array API, data types")
def test_all_integers_get_the_default_integer_dtype(backend, place):
    """Give all Python integers the framework's default integer dtype.

    A dtype that depends on the value breaks compiled programs.
    """
    numbers = (1, [1, 2], [[True, 2]], range(3), range(0))
    made = [backend.asarray(data, device=place) for data in numbers]
    made += [backend.arange(*bounds, device=place) for bounds in ((3,), (0,), (3, 1), (0, 9, 2))]
    made += [backend.full(2, 1, device=place)]
    assert {backend.dtype_of(x) for x in made} == {framework_of(backend).tensors.default_dtypes[0]}


@requirement("create.default-complex-dtype", section=SECTION, source="array API, data types")
def test_the_default_dtype_of_complex_numbers_is_complex64(backend, place):
    """Give Python's complex numbers the dtype complex64."""
    names = [name for name in backend.dtype_names if name == "complex64"]
    for name in names:
        made = [backend.asarray(data, device=place) for data in (1j, [1, 2j], [[0.5, 1j]])]
        made += [backend.full(2, 1j, device=place)]
        assert {backend.dtype_of(x) for x in made} == {name}


@requirement("create.empty-ranges", section=SECTION, source="contract, Dtypes of new tensors")
@pytest.mark.parametrize("arguments", [(0, 0.0), (1, 0.0), (0.0, 0), (0, 0, 1.0), (3, 0, 0.5)])
def test_an_empty_range_has_the_dtype_of_its_numbers(backend, place, arguments):
    """Give an empty ``arange`` the dtype of its arguments.

    Results of a loop have one dtype, also in a step without elements.
    """
    x = backend.arange(*arguments, device=place)
    assert (backend.dtype_of(x), tuple(x.shape)) == ("float32", (0,))


@requirement(
    "create.integers-that-do-not-fit", section=SECTION, source="contract, Dtypes of new tensors"
)
@pytest.mark.parametrize(
    "make",
    [
        lambda backend: backend.asarray(2**70),
        lambda backend: backend.asarray([0, -(2**70)]),
        lambda backend: backend.asarray(2**31, dtype="int32"),
        lambda backend: backend.asarray([[2**31], [0]], dtype="int32"),
        lambda backend: backend.full(1, 2**70),
        lambda backend: backend.full(1, -(2**31) - 1, dtype="int32"),
        lambda backend: backend.arange(2**70, 2**70 + 2),
        lambda backend: backend.arange(2**31 - 1, 2**31 + 1, dtype="int32"),
    ],
)
def test_an_integer_that_its_dtype_does_not_hold_is_refused(backend, make):
    """Refuse an integer that its dtype cannot hold.

    Frameworks wrap it round to another number without a sign.
    """
    with pytest.raises(UnsupportedValueError, match="does not fit into int"):
        make(backend)


@requirement(
    "create.values-that-do-not-fit", section=SECTION, source="contract, Dtypes of new tensors"
)
@pytest.mark.parametrize("way", ["dtype", "like"])
@pytest.mark.parametrize("misfit", hostile.MISFITS, ids=lambda each: f"{each[0]} in {each[1]}")
def test_a_value_that_its_dtype_does_not_hold_is_refused(backend, place, misfit, way):
    """Refuse a number that the dtype cannot hold, with ``dtype=`` and with ``like=``.

    0.25 as an integer is 0, and NaN becomes an arbitrary one.
    """
    value, name = misfit
    given = {"device": place, "dtype": name}
    if way == "like":
        given = {"like": backend.zeros(1, dtype=name, device=place)}
    calls = [
        lambda: backend.full((1, 4), value, **given),
        lambda: backend.asarray(value, **given),
        lambda: backend.asarray([[value]], **given),
        lambda: backend.full((1, 4), np.asarray(value)[()], **given),
    ]
    for call in calls:
        with pytest.raises(UnsupportedValueError, match=f"does not fit into {name}"):
            call()


@requirement(
    "create.arrays-that-do-not-fit", section=SECTION, source="contract, Dtypes of new tensors"
)
def test_an_array_with_a_value_that_the_dtype_does_not_hold_is_refused(backend, place):
    """Refuse a NumPy array with values that the integer dtype cannot hold.

    NumPy's own conversion of NaN differs from machine to machine.
    """
    cases = [([0.0, 0.25], "int32"), ([0, 300], "uint8"), ([-1, 0], "uint8"), ([0, 2], "bool")]
    for values, name in cases:
        with pytest.raises(UnsupportedValueError, match=f"does not fit into {name}"):
            backend.asarray(np.array(values), dtype=name, device=place)


@requirement(
    "create.ranges-that-do-not-fit", section=SECTION, source="contract, Dtypes of new tensors"
)
@pytest.mark.parametrize("numbers", [(0, 2, 0.5), (0.5, 3.0), (-2.0, 1.0)], ids=str)
def test_a_range_of_numbers_that_the_dtype_does_not_hold_is_refused(backend, place, numbers):
    """Refuse an ``arange`` whose numbers the dtype of ``like=`` cannot hold.

    A step of 0.5 as an integer never ends, or repeats numbers.
    """
    with pytest.raises(UnsupportedValueError, match="does not fit into uint8"):
        backend.arange(*numbers, like=backend.zeros(1, dtype="uint8", device=place))


@requirement("create.values-that-fit", section=SECTION, source="contract, Dtypes of new tensors")
def test_a_value_of_another_kind_that_the_dtype_holds_is_accepted(backend, place):
    """Accept a value of another kind if the dtype holds it, such as 2.0 in int32.

    The check is about lost values, and not about types.
    """
    pairs = [(2.0, "int32"), (True, "int32"), (1, "bool"), (0.0, "bool"), (255.0, "uint8")]
    pairs += [(float("inf"), "float32"), (float("nan"), "float32"), (3.4e38, "float32")]
    for value, name in pairs:
        like = backend.zeros(1, dtype=name, device=place)
        for x in (backend.full(1, value, like=like), backend.asarray([value], dtype=name)):
            np.testing.assert_array_equal(backend.to_numpy(x), np.array([value], name))
    x = backend.arange(1.0, 4.0, dtype="int32", device=place)
    assert_same(backend.to_numpy(x), np.arange(1, 4, dtype="int32"))


@requirement("create.large-integers", section=SECTION, source="contract, Dtypes of new tensors")
@pytest.mark.parametrize("kind", [int, np.uint64], ids=["Python's", "NumPy's"])
def test_integers_that_a_dtype_holds_are_not_rounded(backend, place, kind):
    """Keep integers up to the end of each integer dtype, from Python and NumPy.

    A list with mixed integers passes through float64 in NumPy.
    """
    names = [name for name in backend.dtype_names if name.startswith(("int", "uint"))]
    for name in names:
        data = [kind(np.iinfo(name).max - 1), 0, True]
        for values in (data, data[:1]):
            x = backend.to_numpy(backend.asarray(values, dtype=name, device=place))
            assert (x.dtype.name, x.tolist()) == (name, values)
    assert names


@requirement(
    "create.huge-integers-as-floats", section=SECTION, source="contract, Dtypes of new tensors"
)
def test_an_integer_that_no_dtype_of_integers_holds_is_made_a_float_if_asked(backend, place):
    """Convert an integer beyond every integer dtype if a float dtype is asked for.

    2**70 is a float that float32 holds exactly.
    """
    made = [backend.asarray(data, dtype="float32", device=place) for data in (2**70, [2**70])]
    made += [backend.full(1, 2**70, dtype="float32", device=place)]
    assert [backend.to_numpy(x).max() for x in made] == [2.0**70] * 3


@requirement("create.shapes", section=SECTION)
@pytest.mark.parametrize("shape", [3, (3,), [3, 2], (), (0,), (2, 0, 3), np.int64(3)])
def test_a_shape_is_an_integer_or_a_sequence(backend, place, shape):
    """Accept an integer, a tuple and a list as a shape, with and without elements."""
    expected = np.zeros(shape, "float32")
    assert_same(backend.to_numpy(backend.zeros(shape, device=place)), expected)
    assert backend.to_numpy(backend.rand(shape, device=place)).shape == expected.shape


@requirement("create.shapes", section=SECTION)
def test_the_shape_of_a_tensor_is_a_shape(backend, place):
    """Accept the shape of a tensor, as the framework returns it."""
    x = backend.zeros((3, 2), device=place)
    for made in (backend.ones(x.shape, like=x), backend.randn(x.shape, like=x)):
        assert backend.to_numpy(made).shape == (3, 2)
        assert backend.device_of(made) is place


@requirement("create.bad-shapes", section=SECTION, source="contract")
@pytest.mark.parametrize("shape", [2.5, "x", (1.5,), (2, -1), None, {}], ids=repr)
def test_an_invalid_shape_is_refused(backend, shape):
    """Refuse an invalid shape, and quote it.

    Frameworks round fractions, and read texts as sequences.
    """
    with pytest.raises(UnsupportedValueError) as caught:
        backend.zeros(shape)
    assert repr(shape) in str(caught.value)


@requirement("create.from-numpy", section=SECTION, source="array API, asarray")
def test_a_numpy_array_is_taken_as_it_is(backend, dtype, place):
    """Take a NumPy array with its shape, dtype and values, to each device."""
    data = numbers(dtype)
    x = backend.asarray(data, device=place)
    assert backend.device_of(x) is place
    assert_same(backend.to_numpy(x), data)


@requirement("create.never-aliases-numpy", section=SECTION, source="contract")
@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("name", ["float32", "int32", "bool"])
def test_an_aligned_numpy_array_is_never_aliased(backend, place, alignment, name):
    """Copy NumPy's memory in ``asarray``, however it is aligned.

    Some frameworks share aligned memory, so results depend on the allocator.
    """
    data = make_aligned(1024, alignment).view(name)
    data[:] = 1
    x = backend.asarray(data, device=place)
    data[:] = 0
    assert_same(backend.to_numpy(x), np.ones_like(data))


@requirement("create.numpy-layouts", section=SECTION, source="NumPy, arrays")
def test_numpy_arrays_of_any_layout_are_taken(backend, place):
    """Take NumPy arrays that are reversed, strided, transposed or read-only.

    Slices of data sets have such layouts.
    """
    data = numbers("float32", (4, 6))
    read_only = data.copy()
    read_only.flags.writeable = False
    layouts = [data[::-1], data[:, ::2], data.T, data.astype(">f4"), read_only]
    for layout in layouts:
        x = backend.to_numpy(backend.asarray(layout, device=place))
        assert_same(x, np.ascontiguousarray(layout, "=f4"))
    longs = backend.asarray(np.arange(3, dtype=np.longlong), device=place)  # another int64
    assert backend.to_numpy(longs).tolist() == [0, 1, 2]


@requirement("create.from-lists-and-numbers", section=SECTION, source="array API, asarray")
def test_lists_and_numbers_are_taken(backend, place):
    """Take nested lists and single numbers as data."""
    x = backend.asarray([[1.5, 2.0], [3.0, 4.0]], device=place)
    assert_same(backend.to_numpy(x), np.array([[1.5, 2.0], [3.0, 4.0]], "float32"))
    assert_same(backend.to_numpy(backend.asarray(2.5, device=place)), np.array(2.5, "float32"))
    assert backend.to_numpy(backend.asarray([True, False], device=place)).dtype == np.bool_
    assert backend.to_numpy(backend.asarray([], device=place)).shape == (0,)


@requirement("create.from-numpy-scalars", section=SECTION, source="contract, Dtypes of new tensors")
def test_numpy_scalars_keep_their_dtype(backend, place):
    """Keep the dtype of NumPy's scalars, also in lists and in ``full``.

    A scalar of NumPy states its dtype, unlike a Python number.
    """
    x = backend.asarray(np.int8(25), device=place)
    assert_same(backend.to_numpy(x), np.array(25, "int8"))
    made = [
        backend.asarray(data, device=place) for data in ([np.int8(25)], (np.array([25], "i1"),))
    ]
    made += [backend.full(1, np.int8(25), device=place)]
    assert [backend.dtype_of(x) for x in made] == ["int8"] * 3
    wide = _as_data(backend, "float64")
    made = [backend.asarray(data, device=place) for data in (np.float64(0.1), [np.float64(0.1)])]
    assert [backend.dtype_of(x) for x in made] == [wide] * 2


def _as_data(backend, name):
    """Return the dtype of a tensor of 64-bit data: 32 bits where there are no more."""
    return name if name in backend.dtype_names else name.replace("64", "32")


@requirement("create.wide-numpy-data", section=SECTION, source="contract, Dtypes of new tensors")
@pytest.mark.parametrize("name", ["float64", "int64"])
def test_wide_numpy_data_gets_the_frameworks_dtype(backend, place, name):
    """Give NumPy's 64-bit data the dtype that the framework gives it.

    JAX narrows 64 bits, and its users expect that.
    """
    x = backend.asarray(np.arange(3).astype(name), device=place)
    assert backend.dtype_of(x) == _as_data(backend, name)
    np.testing.assert_array_equal(backend.to_numpy(x), np.arange(3))


@requirement("create.conversion", section=SECTION, source="array API, asarray")
def test_data_is_converted_to_the_dtype_that_is_asked_for(backend, place):
    """Convert arrays and tensors to the dtype that is asked for, on their device."""
    x = backend.asarray(np.arange(3), dtype="float32", device=place)
    assert_same(backend.to_numpy(x), np.arange(3, dtype="float32"))
    y = backend.asarray(x, dtype="int32")
    assert_same(backend.to_numpy(y), np.arange(3, dtype="int32"))
    assert backend.device_of(y) is place


@requirement("create.a-tensor-comes-back", section=SECTION, source="array API, asarray")
def test_asarray_returns_a_tensor_that_needs_no_change_itself(backend, place):
    """Return from ``asarray`` the tensor itself if nothing has to change."""
    x = backend.ones(2, device=place)
    assert backend.asarray(x) is x
    assert backend.asarray(x, dtype="float32", device=place) is x


@requirement("create.a-tensor-moves-if-asked", section=SECTION, source="array API, asarray")
def test_a_tensor_moves_to_the_device_that_is_asked_for(backend, route):
    """Move a tensor in ``asarray`` to the given device, and only then."""
    source, target = route
    x = backend.ones(2, device=source)
    assert backend.device_of(backend.asarray(x, device=target)) is target
    assert backend.device_of(backend.asarray(x)) is source


@requirement("create.copy-is-new-memory", section=SECTION, source="array API, asarray")
def test_a_copy_that_is_asked_for_is_new_memory(backend, place):
    """Return new memory from ``asarray(x, copy=True)``, whatever else is asked.

    The caller will write to it.
    """
    x = backend.ones(2, device=place)
    for options in ({}, {"dtype": "float32"}, {"device": place}, {"dtype": "int32"}):
        y = backend.asarray(x, copy=True, **options)
        assert backend.device_of(y) is place
        assert backend.address(y) != backend.address(x)
        np.testing.assert_array_equal(backend.to_numpy(y), np.ones(2))
    assert backend.dtype_of(backend.asarray([1.5], copy=True)) == "float32"


@requirement("create.no-copy", section=SECTION, source="array API, asarray")
def test_without_a_copy_there_is_the_same_tensor_or_an_error(backend, place):
    """Return the tensor itself with ``copy=False``, or refuse.

    The caller relies on shared memory.
    """
    x = backend.ones(2, device=place)
    assert backend.asarray(x, copy=False) is x
    assert backend.asarray(x, copy=False, dtype="float32", device=place) is x
    with pytest.raises(UnsupportedValueError, match="copy=False"):
        backend.asarray(x, copy=False, dtype="int32")
    for data in (np.ones(2, "float32"), [1.5], 1.5):
        with pytest.raises(UnsupportedValueError, match="copy=False"):
            backend.asarray(data, copy=False)


@requirement("create.no-copy", section=SECTION, source="array API, asarray")
def test_without_a_copy_no_tensor_moves(backend, route):
    """Refuse ``copy=False`` if the tensor is on another device.

    No two devices share memory.
    """
    source, target = route
    with pytest.raises(UnsupportedValueError, match="copy=False"):
        backend.asarray(backend.ones(2, device=source), copy=False, device=target)


@requirement("create.special-values", section=SECTION, source="array API, data types")
def test_nan_infinity_and_the_sign_of_zero_survive(backend, place):
    """Keep NaN, infinity, the sign of zero and the smallest numbers.

    Some devices flush subnormal numbers to zero.
    """
    data = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], "float32")
    assert_same(backend.to_numpy(backend.asarray(data, device=place)), data)


@requirement("create.refuses-objects", section=SECTION, source="contract, Containers and errors")
@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array([1, "x"], dtype=object),
        "text",
        ["a", "b"],
        None,
        {},
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_asarray_refuses_values_without_numbers(backend, value):
    """Refuse in ``asarray`` texts, objects and None, with a line that helps.

    NumPy makes an object array of anything.
    """
    with pytest.raises(UnsupportedValueError) as caught:
        backend.asarray(value)
    assert caught.value.fix


@requirement(
    "create.refuses-ragged-lists", section=SECTION, source="contract, Containers and errors"
)
def test_a_ragged_list_is_refused(backend):
    """Refuse a ragged list, and quote it.

    A tensor has one length along each axis.
    """
    with pytest.raises(UnsupportedValueError, match=r"\[\[1\], \[2, 3\]\]"):
        backend.asarray([[1], [2, 3]])


@requirement(
    "create.refuses-other-dtypes", section=SECTION, source="contract, Containers and errors"
)
@pytest.mark.parametrize("name", ["datetime64[s]", "S3", "longdouble", "V4"])
def test_an_array_of_a_dtype_that_no_framework_has_is_refused(backend, name):
    """Refuse arrays of dates, bytes and other dtypes without a tensor.

    Their memory read as numbers would be nonsense.
    """
    with pytest.raises(UnsupportedValueError):
        backend.asarray(np.zeros(2, np.dtype(name)))


# So many numbers that no device holds them: 4 PiB of float32.
_HUGE = 2**50
_TOO_LARGE = {
    "zeros": lambda backend, place: backend.zeros((_HUGE,), device=place),
    "ones": lambda backend, place: backend.ones((_HUGE,), device=place),
    "full": lambda backend, place: backend.full((_HUGE,), 2, device=place),
    "arange": lambda backend, place: backend.arange(float(_HUGE), device=place),
    "rand": lambda backend, place: backend.rand((_HUGE,), device=place),
    "randn with a seed": lambda backend, place: backend.randn((_HUGE,), seed=1, device=place),
    "asarray": lambda backend, place: backend.asarray(_huge_array(), device=place),
    "to": lambda backend, place: backend.to([_huge_array()], place),
}


def _huge_array():
    """Return an array of NumPy's whose elements are all the same one."""
    return np.broadcast_to(np.float32(0), (_HUGE,))


@requirement("create.out-of-memory", section=SECTION, source="contract, Containers and errors")
@pytest.mark.parametrize("make", _TOO_LARGE.values(), ids=_TOO_LARGE)
def test_running_out_of_memory_is_a_d2ldev_error(backend, place, make):
    """Report a tensor that is too large as ``OutOfDeviceMemoryError``, and work on.

    Each framework raises a type of its own.
    """
    with pytest.raises(OutOfDeviceMemoryError, match=str(place)) as caught:
        make(backend, place)
    assert caught.value.__cause__ is not None
    assert backend.device_of(backend.zeros(2, device=place)) is place
