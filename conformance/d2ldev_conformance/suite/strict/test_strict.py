"""D2L 6.7.2.2: "do not simply add X and Y, since this will result in an exception". It does.

The book says that mixing devices is an error. Virtual GPUs, and some frameworks, compute all the
same, and the program fails only on hardware.
"""

from __future__ import annotations

import operator
import re

import numpy as np
import pytest

from d2ldev import DeviceMismatchError
from d2ldev_conformance.provision import take_own_call
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, outcome_of
from d2ldev_conformance.suite.fixes import run, run_and_mend

SECTION = "6.7.2.2"
SOURCE_OF_ERRORS = "contract, Containers and errors"
SOURCE = "contract, Mixing devices"

OPERATIONS = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "power": lambda x, y: x**y,
    "less": lambda x, y: x < y,
    "matmul": lambda x, y: x @ y,
}
# What frameworks call them: ``sub`` and ``subtract``, ``jnp.add`` and ``AddV2``.
SPELLINGS = {
    "add": "add",
    "subtract": "sub(tract)?",
    "multiply": "mul(tiply)?",
    "divide": "(true|real)?_?div(ide)?",
    "power": "pow(er)?",
    "less": "less|lt",
    "matmul": "mat_?mul|mm|dot(_general)?",
}


@pytest.fixture(params=sorted(OPERATIONS))
def operation(request):
    """Each operation of two tensors that every framework spells alike."""
    return OPERATIONS[request.param]


@pytest.fixture
def elsewhere(backend, route):
    """Two tensors that are not on one device."""
    source, target = route
    return backend.full((2, 2), 3.0, device=source), backend.full((2, 2), 2.0, device=target)


@requirement("strict.mixing-raises", section=SECTION, source="D2L")
def test_an_operation_that_mixes_devices_raises(backend, elsewhere, operation):
    """Raise ``DeviceMismatchError`` in an operation whose operands are on two devices."""
    x, y = elsewhere
    with pytest.raises(DeviceMismatchError), backend.strict():
        operation(x, y)


@requirement("strict.operands-in-a-list", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("name", ["concat", "stack"])
def test_tensors_in_a_list_are_operands(backend, elsewhere, name):
    """Raise in the framework's ``concat`` and ``stack`` of tensors that are on two devices.

    The book joins ``X`` and ``Y`` so, which are then in a list.
    """
    x, y = elsewhere
    join = take_own_call(backend, name)
    with pytest.raises(DeviceMismatchError), backend.strict():
        join(x, y)


INDEXINGS = {
    "integers": ([2, 0], lambda x, index: x[0, :][index]),
    "integers of two axes": ([2, 0], lambda x, index: x[index * 0, index]),
    "a mask": ([[True, False, True], [False, True, True]], lambda x, index: x[index]),
}


@requirement("strict.indices-are-operands", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("way", INDEXINGS)
def test_an_index_on_another_device_is_refused_or_copied(backend, route, way):
    """Raise for indices and masks on another GPU, and for those of a GPU on the CPU.

    A framework may copy indices from the CPU. Then it returns what an index beside the tensor does.
    """
    source, target = route
    values, index = INDEXINGS[way]
    x = backend.asarray(np.arange(6, dtype="float32").reshape(2, 3), device=source)
    here, there = (backend.asarray(np.array(values), device=device) for device in route)
    try:
        expected = index(x, here)
    except Exception as error:
        pytest.skip(f"the framework has no such index: {error}")
    with backend.strict():
        assert_same(backend.to_numpy(index(x, here)), backend.to_numpy(expected))
    try:
        with backend.strict():
            found = index(x, there)
    except DeviceMismatchError:
        return
    assert target is backend.cpu()
    assert backend.device_of(found) is source
    assert_same(backend.to_numpy(found), backend.to_numpy(expected))


WAYS = {
    "to": lambda backend, x, device: backend.to(x, device),
    "to, in a batch": lambda backend, x, device: backend.to({"x": [x]}, device)["x"][0],
    "place": lambda backend, x, device: backend.place({"x": [x]}, device)["x"][0],
    "copy": lambda backend, x, device: backend.copy(x, device),
    "asarray": lambda backend, x, device: backend.asarray(x, device=device),
    "replicate": lambda backend, x, device: backend.replicate(x, [device])[0],
    "prefetch": lambda backend, x, device: next(iter(backend.prefetch([x], device))),
}


@pytest.mark.parametrize("way", WAYS)
@requirement("strict.keeps-what-was-moved", section=SECTION)
def test_a_native_tensor_moved_to_its_own_device_stays_there(backend, route, way):
    """Refuse mixed operands also after a move to the tensor's own device.

    JAX lets arrays without a device follow the other operand.
    """
    here, elsewhere = route
    make = take_own_call(backend, "ones")
    with backend.on(here):
        x = make(None)
    assert backend.device_of(x) is here
    moved = WAYS[way](backend, x, here)
    other = backend.ones((2, 2), device=elsewhere)
    with pytest.raises(DeviceMismatchError), backend.strict():
        moved + other


@requirement("strict.raises-at-the-operation", section=SECTION)
def test_the_error_can_be_caught_inside_the_block(backend, elsewhere, operation):
    """Raise at the operation itself, and compute the next one.

    An error at the end of a block does not name the line.
    """
    x, y = elsewhere
    with backend.strict():
        with pytest.raises(DeviceMismatchError):
            operation(x, y)
        assert backend.device_of(operation(x, x)) is backend.device_of(x)


@requirement("strict.refused-in-place", section=SECTION)
@pytest.mark.parametrize("name", ["iadd", "isub", "imul"])
def test_an_operation_in_place_that_is_refused_changes_nothing(backend, elsewhere, name):
    """Change nothing in a refused operation in place.

    The caller may catch the error, and use the tensor.
    """
    x, y = elsewhere
    before = backend.to_numpy(x)
    with pytest.raises(DeviceMismatchError), backend.strict():
        getattr(operator, name)(x, y)
    assert_same(backend.to_numpy(x), before)


@requirement("strict.names-the-operation", section=SECTION, source=SOURCE_OF_ERRORS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_error_names_the_operation(backend, elsewhere, name):
    """Name the operation in the error.

    A line may have five operations.
    """
    x, y = elsewhere
    with pytest.raises(DeviceMismatchError) as caught, backend.strict():
        OPERATIONS[name](x, y)
    attempted = caught.value.attempted.removeprefix("run ")
    assert re.fullmatch(rf"(\w*[._])?({SPELLINGS[name]})(v\d+)?", attempted, re.IGNORECASE)


@requirement("strict.names-the-devices", section=SECTION, source=SOURCE_OF_ERRORS)
def test_the_error_names_each_operands_device_and_the_fix(backend, route, elsewhere):
    """Name the device of each operand in the error, and the line that fixes it.

    An operand of an expression has no name in the program, so that the line says which it is. The
    words of the problem are PyTorch's, which libraries look for.
    """
    x, y = operands = [*elsewhere]
    with pytest.raises(DeviceMismatchError) as caught, backend.strict():
        x + y
    error = caught.value
    assert set(error.devices) == {str(device) for device in route}
    assert all(str(device) in error.problem for device in route)
    assert "Expected all tensors to be on the same device" in str(error)
    line, _, where = error.fix.partition(", where ")
    places = {name: int(number) - 1 for name, number in re.findall(r"([xy]) .*?(\d+)", where)}
    places = places or {"x": 0, "y": 1}
    names = {"backend": backend, **{name: operands[i] for name, i in places.items()}}
    exec(line, names)  # noqa: S102 - the error's own line has to work
    for name, i in places.items():
        operands[i] = names[name]
    with backend.strict():
        operands[0] + operands[1]


@requirement("strict.names-operands-of-the-program", section=SECTION, source=SOURCE_OF_ERRORS)
@pytest.mark.parametrize(
    ("line", "titles"),
    {
        "images + kernel": ("images", "kernel"),
        "images -= kernel": ("images", "kernel"),
        "images * box['kernel']": ("images", "box['kernel']"),
        "net(images)": ("net", "images"),
        "box['net'](images)": ("box['net']", "images"),
    }.items(),
)
def test_the_error_names_operands_as_the_program_does(backend, route, line, titles):
    """Name the operands as the line of the program does, also in the line that fixes it.

    ``operand 2`` has to be counted, and is not in the program.
    """
    source, target = route
    kernel = backend.ones((2, 2), device=target)
    names = {
        "backend": backend,
        "kernel": kernel,
        "box": {"kernel": kernel, "net": backend.mlp([2, 1], device=target)},
        "images": backend.ones((2, 2), device=source),
        "net": backend.mlp([2, 1], device=target),
    }
    error, mended = run_and_mend(f"with backend.strict():\n    {line}", names)
    assert all(f"{title} on " in error.problem for title in titles)
    run(mended, names)


@requirement("strict.names-no-unknown-operands", section=SECTION, source=SOURCE_OF_ERRORS)
@pytest.mark.parametrize("line", ["images @ (kernel + 1)", "(images + 1) @ (kernel + 1)"])
def test_the_error_names_no_operand_whose_value_is_unknown(backend, route, line):
    """Name no operand after an expression whose value the program does not keep.

    The operands of an operation may be others than the expressions in its line.
    """
    source, target = route
    names = {
        "backend": backend,
        "images": backend.ones((2, 2), device=source),
        "kernel": backend.ones((2, 2), device=target),
    }
    with pytest.raises(DeviceMismatchError) as caught:
        run(f"with backend.strict():\n    {line}", names)
    assert not re.search("images|kernel", caught.value.problem + caught.value.fix)


@requirement("strict.scalars-on-other-devices", section=SECTION)
def test_numbers_are_not_operands(backend, place):
    """Compute with Python's numbers on any device.

    A number has no device.
    """
    x = backend.full((2, 2), 3.0, device=place)
    with backend.strict():
        results = [x + 1, 2.0 * x, x**2, x > 1]
    assert [backend.device_of(y) for y in results] == [place] * len(results)
    assert_same(backend.to_numpy(results[0]), np.full((2, 2), 4.0, "float32"))


@requirement("strict.agreeing-operands", section=SECTION)
def test_operands_on_one_device_are_computed_with_there(backend, place, operation):
    """Compute operands on one device there, with right values.

    A check that disturbs right programs is switched off.
    """
    x = backend.full((2, 2), 3.0, device=place)
    y = backend.full((2, 2), 2.0, device=place)
    with backend.strict():
        z = operation(x, y)
        assert backend.device_of(z) is place
    expected = operation(np.full((2, 2), 3, "float32"), np.full((2, 2), 2, "float32"))
    np.testing.assert_allclose(backend.to_numpy(z), expected, rtol=1e-6)


@requirement("strict.moving-is-no-mixing", section=SECTION)
def test_moves_by_d2ldev_are_allowed_in_a_strict_block(backend, route):
    """Allow ``to``, ``copy``, ``asarray`` and ``place`` in a block.

    A move is how a mismatch is fixed.
    """
    source, target = route
    with backend.strict():
        x = backend.rand((2, 2), seed=0, device=source)
        moved, copied = backend.to(x, target), backend.copy(x, target)
        made = backend.asarray(x, device=target)
        batch = backend.to({"x": [x], "y": (moved, 1)}, target)
        net = backend.place(backend.mlp([2, 1], device=source), target)
        y = net(moved)
        values = [backend.to_numpy(tensor) for tensor in (x, moved, copied, made)]
    there = [moved, copied, made, batch["x"][0], y]
    assert [backend.device_of(tensor) for tensor in there] == [target] * len(there)
    assert all(np.array_equal(value, values[0]) for value in values)


@requirement("strict.creation", section=SECTION)
def test_tensors_are_made_in_a_block(backend, place):
    """Make tensors in a block on the given device.

    Frameworks make some of them from parts on the CPU.
    """
    with backend.strict():
        made = [
            backend.zeros(2, device=place),
            backend.full((2,), 1.5, device=place),
            backend.arange(3, device=place),
            backend.randn((2,), seed=1, device=place),
            backend.asarray([1.0, 2.0], device=place),
            backend.asarray(np.arange(3), device=place),
        ]
        with backend.on(place):
            made.append(backend.ones(2))
    assert [backend.device_of(x) for x in made] == [place] * len(made)


@requirement("strict.models", section=SECTION, source="D2L")
def test_a_model_called_with_data_on_another_device_raises(backend, route):
    """Raise in a model that is called with data on another device."""
    source, target = route
    net = backend.mlp([3, 4, 1], device=source)
    x = backend.ones((2, 3), device=target)
    with pytest.raises(DeviceMismatchError), backend.strict():
        net(x)


@requirement("strict.ends", section=SECTION)
def test_after_the_block_everything_is_as_it_was(backend, elsewhere, operation):
    """Compute after a block as before it.

    A test with a block must not change the next one.
    """
    x, y = elsewhere
    before = outcome_of(backend, operation, x, y)
    with backend.strict(), backend.strict():
        operation(x, x)
    assert outcome_of(backend, operation, x, y) == before


@requirement("strict.ends-under-exceptions", section=SECTION)
def test_a_block_that_was_left_by_an_error_has_ended(backend, elsewhere):
    """End a block that an error leaves.

    In a notebook, the block would stay in force for all cells.
    """
    x, y = elsewhere
    before = outcome_of(backend, OPERATIONS["add"], x, y)
    with pytest.raises(ZeroDivisionError), backend.strict():
        1 / 0  # noqa: B018
    with pytest.raises(DeviceMismatchError), backend.strict():
        x + y
    assert outcome_of(backend, OPERATIONS["add"], x, y) == before


@requirement("strict.nests", section=SECTION)
def test_after_an_inner_block_the_outer_one_is_in_force(backend, elsewhere):
    """Keep the outer block in force after an inner one.

    Functions with blocks call one another.
    """
    x, y = elsewhere
    with pytest.raises(DeviceMismatchError), backend.strict():  # noqa: PT012  # a block in it
        with backend.strict():
            x + x
        x + y


@requirement("strict.other-errors-stay", section=SECTION)
@pytest.mark.parametrize("error", [RuntimeError("two devices"), ValueError("device"), KeyError(0)])
def test_an_error_about_something_else_is_left_alone(backend, error):
    """Leave an error of another kind as it is, also if it speaks of devices.

    An error that is replaced loses its cause.
    """
    with backend.strict():  # an error of the block itself ends the test here
        pass
    with pytest.raises(type(error)) as caught, backend.strict():
        raise error
    assert caught.value is error


@requirement("strict.other-errors-of-operations-stay", section=SECTION)
def test_errors_for_other_reasons_are_unchanged(backend, place):
    """Leave the framework's error about shapes as it is.

    Operands with two problems are rare, and shapes are the common one.
    """
    x, y = backend.ones((2, 3), device=place), backend.ones((4, 5), device=place)
    with pytest.raises(Exception) as plain:  # noqa: PT011  # each framework has its own
        backend.to_numpy(x + y)
    with pytest.raises(Exception) as strict, backend.strict():  # noqa: PT011
        backend.to_numpy(x + y)
    assert type(strict.value) is type(plain.value)
    assert not isinstance(strict.value, DeviceMismatchError)
