"""The one error family: what each is, what each says, and that it travels between processes."""

import copy
import pickle

import pytest

import d2ldev
from d2ldev import D2LDevError, UnsupportedValueError, errors
from d2ldev.errors import describe, quote, text_of

BUILT_IN_BASES = {
    "InvalidDeviceError": ValueError,
    "UnsupportedValueError": TypeError,
    "UnknownBackendError": ValueError,
    "BackendNotInstalledError": ImportError,
    "PackageNotInstalledError": ImportError,
    "DeviceUnavailableError": RuntimeError,
    "DeviceMismatchError": RuntimeError,
    "ScopeError": RuntimeError,
    "OutOfDeviceMemoryError": MemoryError,
    "CheckpointError": ValueError,
    "PeerLostError": RuntimeError,
}
FAMILY = [D2LDevError, *(getattr(errors, name) for name in BUILT_IN_BASES)]
WARNINGS = [
    d2ldev.BackendFallbackWarning,
    d2ldev.DeviceInitializationWarning,
    d2ldev.MemoryPolicyWarning,
]


def an_error(cls):
    return cls("do this", "it cannot be done", "do that", [d2ldev.gpu(1), d2ldev.cpu()])


def test_the_family_has_no_other_members():
    assert {
        cls.__name__ for cls in D2LDevError.__subclasses__() if cls.__module__ == errors.__name__
    } == {*BUILT_IN_BASES, "NotBegunError"}  # the last is for authors of backends alone


@pytest.mark.parametrize(("name", "base"), BUILT_IN_BASES.items())
def test_each_is_one_of_the_family_and_the_built_in_that_others_would_catch(name, base):
    assert issubclass(getattr(errors, name), D2LDevError)
    assert issubclass(getattr(errors, name), base)


@pytest.mark.parametrize("cls", [*FAMILY, *WARNINGS])
def test_each_can_be_imported_from_the_package(cls):
    assert getattr(d2ldev, cls.__name__) is cls


@pytest.mark.parametrize("cls", WARNINGS)
def test_warnings_are_of_one_family_which_users_are_shown_by_default(cls):
    assert issubclass(cls, d2ldev.D2LDevWarning)
    assert issubclass(d2ldev.D2LDevWarning, UserWarning)


@pytest.mark.parametrize("cls", FAMILY)
def test_the_message_names_attempt_problem_devices_and_fix(cls):
    assert str(an_error(cls)) == (
        "cannot do this: it cannot be done\n  devices: gpu:1, cpu\n  fix: do that"
    )


@pytest.mark.parametrize("cls", FAMILY)
def test_without_devices_the_message_has_no_line_for_them(cls):
    assert str(cls("do this", "it cannot be done", "do that")) == (
        "cannot do this: it cannot be done\n  fix: do that"
    )


@pytest.mark.parametrize("cls", FAMILY)
def test_the_parts_of_the_message_are_attributes(cls):
    error = an_error(cls)
    assert (error.attempted, error.problem, error.fix, error.devices) == (
        "do this",
        "it cannot be done",
        "do that",
        ("gpu:1", "cpu"),
    )


def test_devices_may_be_an_iterator():
    error = D2LDevError("do this", "it cannot be done", "do that", iter(["gpu:0"]))
    assert error.devices == ("gpu:0",)


@pytest.mark.parametrize(
    "copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("cls", FAMILY)
def test_an_error_survives_pickling_and_copying(cls, copied):
    error = an_error(cls)
    again = copied(error)
    assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))


def test_the_exception_of_the_framework_stays_chained_as_the_cause(reference):
    with pytest.raises(d2ldev.UnsupportedValueError) as error:
        reference.from_dlpack("no tensor")
    assert isinstance(error.value.__cause__, (AttributeError, TypeError))


def test_a_value_of_many_lines_is_shown_by_its_class():
    class Model:
        def __repr__(self):
            return "Model(\n  (0): Linear\n)"

    assert errors.describe(Model()) == "a Model"


def test_a_described_value_is_part_of_the_attempt():
    error = D2LDevError(f"train {errors.describe(3)}", "it is not a model", "net = ...")
    assert str(error).startswith("cannot train 3, an int: it is not a model")


class MuteError(Exception):
    """Cannot be turned into text."""

    def __str__(self):
        raise RuntimeError("do not ask")

    __repr__ = __str__


class Loud(str):
    """A text that raises wherever it is written."""

    def __str__(self, *_):
        raise RuntimeError("do not ask")

    __repr__ = __format__ = __str__


class ShowsLoud:
    """Is shown as a text that raises."""

    def __repr__(self):
        return Loud("loud")

    __str__ = __repr__


class Freed:
    """Like a tensor whose memory is gone: a framework ends the process that prints it."""

    shape, dtype = (2, 3), "float32"

    def __dlpack__(self):
        raise RuntimeError("do not look")

    __repr__ = __dlpack__


@pytest.mark.parametrize("cls", [MuteError, Loud, ShowsLoud])
@pytest.mark.parametrize("text_of", [text_of, quote, describe])
def test_no_value_keeps_a_message_from_being_written(text_of, cls):
    assert type(f"{text_of(cls())}") is str


def test_a_tensor_is_described_without_its_values():
    assert quote(Freed()) == "<Freed of shape (2, 3) and dtype float32>"


def raise_error(error):
    def method(*_):
        raise error

    return method


@pytest.mark.parametrize(
    "call",
    [
        lambda backend, odd: backend.mlp(odd),
        lambda backend, odd: backend.copy(odd),
        lambda backend, odd: backend.place(odd, "cpu"),
        lambda backend, odd: backend.asarray(odd),
        lambda backend, odd: backend.full(2, odd),
        lambda backend, odd: backend.rand(2, seed=odd),
        lambda backend, odd: backend.from_dlpack(odd),
    ],
    ids=["mlp", "copy", "place", "asarray", "full", "rand", "from_dlpack"],
)
def test_an_error_without_a_text_is_passed_on_as_the_cause(reference, call):
    names = ("__iter__", "__array__", "__index__", "__dlpack__", "__dlpack_device__")
    odd = type("Odd", (list,), dict.fromkeys(names, raise_error(MuteError())))([1.0])
    with pytest.raises(UnsupportedValueError):
        call(reference, odd)
