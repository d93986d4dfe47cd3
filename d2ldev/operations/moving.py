"""Copies between devices: where the user wrote one, and nowhere else.

Source: D2L, section 6.7.2.2, "Copying".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from d2ldev.contract import DeviceLike, DTypeLike, Framework, Sharded, Tensor
from d2ldev.contract.abilities import require
from d2ldev.device import CPU, Device
from d2ldev.errors import D2LDevError, NotBegunError, UnsupportedValueError, describe, text_of
from d2ldev.nesting.containers import is_of_numpy
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, UNKNOWN
from d2ldev.nesting.walk import Flattened, flatten
from d2ldev.operations import creation, devices, values
from d2ldev.operations.other_backends import of_another_backend
from d2ldev.registry.selection import framework_of_tensor

if TYPE_CHECKING:
    import numpy as np


def to(framework: Framework, x: Any, target: Device) -> Any:
    """Move every tensor in a nesting to a device that exists; see ``Backend.to``."""
    flat = find_elsewhere(framework, x, target)
    return x if flat is None else move(framework, flat, target)


def find_elsewhere(framework: Framework, x: Any, target: Device) -> Flattened | None:
    """Return the leaves of a nesting that are not on a device yet; None if all are there.

    They include data, which has no device.
    """
    kinds, is_on = framework.state.kinds, framework.tensors.is_on
    flat = flatten(x, kinds, _moving_a_batch[target], is_on, target)
    return flat if flat.tensors or flat.others else None


def move(framework: Framework, flat: Flattened, target: Device) -> Any:
    """Return a nesting with its leaves on a device.

    Args:
        framework: whose tensors they are.
        flat: the leaves that are elsewhere.
        target: the device.
    """
    attempted = _moving_a_batch[target]
    by_themselves, data = _divide_others(framework, flat)
    changed = _tensors_of_data(framework, flat, data, target, attempted) if data else {}
    if flat.tensors:
        new = transfer(framework, list(flat.tensors.values()), target, attempted, copy=False)
        changed.update(zip(flat.tensors, new, strict=True))
    return _end_move(framework, flat, changed, by_themselves, target)


def begin_move(framework: Framework, flat: Flattened, target: Device) -> Callable[[], Any]:
    """Begin to bring the leaves of a nesting to a device; return a function that ends it.

    That one returns the nesting. Data goes by way of tensors of the host, because copies between
    tensors are asynchronous, and made together.

    Args:
        framework, flat, target: see ``move``.
    """
    attempted = _moving_a_batch[target]
    by_themselves, data = _divide_others(framework, flat)
    if data:
        flat.replace(_tensors_of_data(framework, flat, data, CPU, attempted))
    native = devices.native(framework, target, attempted)
    xs = list(flat.tensors.values())
    with translate(framework, xs, native, attempted):
        finish = framework.tensors.transfer_ahead(xs, native) if xs else list

    def end() -> Any:
        with translate(framework, xs, native, attempted):
            changed = dict(zip(flat.tensors, finish(), strict=True))
        return _end_move(framework, flat, changed, by_themselves, target)

    return end


def _end_move(
    framework: Framework,
    flat: Flattened,
    changed: dict[int, Any],
    by_themselves: dict[int, Any],
    target: Device,
) -> Any:
    """Return a nesting with new tensors, after the objects that move by themselves."""
    # Last: one that moves in place has moved when anything else fails.
    for key, leaf in by_themselves.items():
        changed[key] = _move_by_itself(framework, leaf, target, _moving_a_batch[target], flat)
    return flat.unflatten(changed)


def is_text(x: Any) -> bool:
    """Return whether a value is a NumPy array of text, which is the host's data on all devices."""
    if not is_array(x):
        return False
    kind = x.dtype.kind
    return kind in "SUT" or (kind == "O" and all(isinstance(each, (str, bytes)) for each in x.flat))


def flatten_on_host(framework: Framework, x: Any, attempted: str) -> Flattened:
    """Return the leaves of a nesting whose data are tensors in the host's memory.

    Its own tensors stay. It is walked again only if it has data.
    """
    flat = flatten(x, framework.state.kinds, attempted)
    made = _tensors_of_data(framework, flat, flat.others, CPU, attempted)
    return flatten(flat.unflatten(made), framework.state.kinds, attempted) if made else flat


def _divide_others(framework: Framework, flat: Flattened) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the leaves that move by themselves, and the other leaves that are not tensors."""
    method_of = framework.state.kinds.method_of
    by_themselves: dict[int, Any] = {}
    data: dict[int, Any] = {}
    for key, leaf in flat.others.items():
        (data if method_of(type(leaf), 0) is None else by_themselves)[key] = leaf
    return by_themselves, data


def _move_by_itself(
    framework: Framework, x: Any, device: Device, attempted: str, flat: Flattened
) -> Any:
    """Return what an object's own method makes of it on a device."""
    native = framework.state.known_natives.get(device)
    if native is None:
        native = devices.native(framework, device, attempted)
    return _call_own(framework, x, 0, native, attempted, flat)


def _copy_by_itself(framework: Framework, x: Any, attempted: str, flat: Flattened) -> Any:
    """Return what an object's own method makes of it in new memory."""
    if framework.state.kinds.method_of(type(x), 1) is None:
        raise leaf_refusal(framework, attempted, x, flat.name_of(x))
    return _call_own(framework, x, 1, None, attempted, flat)


def _call_own(
    framework: Framework, x: Any, which: int, native: Any, attempted: str, flat: Flattened
) -> Any:
    """Call one of ``Tensors.own_methods``. One that returns None has changed the object itself."""
    method = framework.state.kinds.method_of(type(x), which) or ""
    arguments = () if native is None else (native,)
    try:
        made = getattr(x, method)(*arguments)
    except Exception as error:  # whatever a user's method raises
        if native is not None and framework.devices.is_out_of_memory(error):
            raise creation.refusal(framework, error, attempted, native, "") from error
        name = type(x).__name__
        raise UnsupportedValueError(
            attempted,
            f"{name}.{method}({', '.join(map(str, arguments))}) at {flat.name_of(x) or 'the top'} "
            f"raised {type(error).__name__}: {text_of(error)}",
            f"take it out of the batch, or d2ldev.register_container({name}, children, rebuild)",
        ) from error
    return x if made is None else made


def copy(framework: Framework, x: Any, target: Device | None) -> Any:
    """Copy every tensor in a nesting into new memory; see ``Backend.copy``.

    Args:
        framework: whose tensors they are.
        x: the nesting.
        target: a device that exists; None leaves each tensor on its own.
    """
    attempted, device_of = "copy a tensor", framework.tensors.device_of
    flat = flatten(x, framework.state.kinds, attempted)
    changed: dict[int, Any] = {}
    for key, leaf in flat.others.items():
        if is_text(leaf):
            changed[key] = leaf.copy()
            continue
        changed[key] = made = _copy_by_itself(framework, leaf, attempted, flat)
        if target is not None:
            changed[key] = _move_by_itself(framework, made, target, attempted, flat)
    # The tensors of one device are copied together, which costs less in some frameworks.
    tensors = flat.tensors
    places = set(map(device_of, tensors.values())) if target is None or not tensors else {target}
    for place in places:
        there = tensors
        if len(places) > 1:
            there = {key: x for key, x in tensors.items() if device_of(x) is place}
        new = transfer(framework, list(there.values()), place, attempted, copy=True)
        changed.update(zip(there, new, strict=True))
    return flat.unflatten(changed)


def convert(
    framework: Framework,
    x: Tensor,
    dtype_spec: DTypeLike | None,
    device: DeviceLike,
    copies: bool | None,
    like: Tensor,
) -> Tensor:
    """Convert a tensor only as far as asked for; see ``Backend.asarray``."""
    tensors = framework.tensors
    if like is not None:
        dtype_spec = creation.dtype_of(framework, like) if dtype_spec is None else dtype_spec
        device = tensors.device_of(like) if device is None else device
    wanted = None if dtype_spec is None else creation.dtype(framework, dtype_spec)
    is_of_dtype = wanted is None or values.name_of(tensors, wanted) == tensors.dtype_of(x)
    if copies is not None and not copies:
        target = None if device is None else devices.resolve(framework, device, "make a tensor")
        if is_of_dtype and (target is None or tensors.device_of(x) is target):
            return x if target is None else to(framework, x, target)
        raise UnsupportedValueError(
            "make a tensor with copy=False",
            f"{describe(x)} has another dtype or device, so that it has to be copied",
            "copy=None, which copies where it has to",
        )
    is_new = False
    if device is not None:
        target = devices.resolve(framework, device, "move a tensor")
        if not tensors.is_on(x, target):
            is_new = tensors.device_of(x) is not target
            (x,) = transfer(framework, [x], target, moving_a_tensor[target], copy=False)
    if is_of_dtype:
        return copy(framework, x, None) if copies and not is_new else x
    try:
        return tensors.astype(x, wanted)
    except NotBegunError:
        raise
    except Exception as error:
        attempted = f"convert a tensor of {tensors.dtype_of(x)} to {wanted}"
        native = framework.devices.native(tensors.device_of(x))
        fix = f"backend.asarray(x, dtype=...) with one of {', '.join(tensors.dtype_names)}"
        raise creation.refusal(framework, error, attempted, native, fix) from error


def to_numpy(framework: Framework, x: Tensor) -> np.ndarray[Any, Any]:
    """Return the values of a tensor in a NumPy array; see ``Backend.to_numpy``."""
    if framework.state.kinds[type(x)] is not TENSOR:
        raise leaf_refusal(framework, "make a NumPy array", x, "")
    try:
        return framework.tensors.to_numpy(x)
    except Exception as error:
        # Described only now: the text of a tensor takes longer than its values.
        attempted = f"make a NumPy array of {describe(x)}"
        native = framework.devices.native(CPU)
        if (ours := copy_refusal(framework, error, attempted, native, x)) is None:
            raise
        raise ours from error


def from_dlpack(framework: Framework, x: Any, device: DeviceLike, copy: bool | None) -> Tensor:
    """Return a tensor on the memory of another framework's; see ``Backend.from_dlpack``."""
    attempted = "take over the memory of a tensor"
    require(framework, "dlpack", attempted)
    target = None if device is None else devices.resolve(framework, device, attempted)
    try:
        own = framework.state.kinds[type(x)] is TENSOR
        shared = framework.tensors.from_dlpack(x if own else _export(x))
    except D2LDevError:
        raise
    except Exception as error:
        if not hasattr(_export(x), "__dlpack__"):
            foreign = of_another_backend(framework, attempted, x)
            if foreign is not None:
                raise foreign from error
        elif copy and not own and not is_text(x) and (target is not None or _is_on_the_host(x)):
            return to(framework, x, target or CPU)  # its values are read in another way
        fix = "copy instead: backend.from_dlpack(x, copy=True)"
        if copy:
            fix = "give its values: backend.asarray(d2ldev.backend_of(x).to_numpy(x))"
        if not hasattr(_export(x), "__dlpack__"):
            fix = "x = backend.asarray(x) makes a tensor"
        raise UnsupportedValueError(
            f"take over the memory of {describe(x)}",
            f"{type(error).__name__}: {text_of(error)}",
            fix,
        ) from error
    place = framework.tensors.device_of(shared)
    if target is None:
        target = place
    if target is place and not copy:
        return shared
    if copy is not None and not copy:
        raise UnsupportedValueError(
            f"take over the memory of {describe(x)} on {target} with copy=False",
            f"it is on {place}",
            "leave copy out: backend.from_dlpack(x, device=device)",
            [place, target],
        )
    (made,) = transfer(framework, [shared], target, moving_a_tensor[target], copy=True)
    if not own:
        # The owner of the memory may write to it as soon as this returns.
        for each in {place, target}:
            framework.devices.synchronize(each)
    return made


# Not ``functools.cache``: torch's compiler ignores it with a warning.
class _Moving(dict[Device, str]):
    """The name of each move, for messages: a lookup takes less time than formatting."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __missing__(self, target: Device) -> str:
        words = self[target] = f"move {self._what} to {target}"
        return words


moving_a_tensor, _moving_a_batch = _Moving("a tensor"), _Moving("a batch")


def transfer(
    framework: Framework, xs: list[Tensor], device: Device, attempted: str, *, copy: bool
) -> list[Tensor]:
    """Return tensors on a device: all of them, or raise.

    Args:
        framework: whose tensors they are.
        xs: the tensors.
        device: one that exists.
        attempted: the current operation, for messages.
        copy: see ``Tensors.transfer``.
    """
    try:
        native = framework.state.known_natives[device]
    except KeyError:
        native = devices.native(framework, device, attempted)
    try:
        return framework.tensors.transfer(xs, native, copy=copy)
    except Exception as error:
        if (ours := copy_refusal(framework, error, attempted, native, xs)) is None:
            raise
        raise ours from error


@contextmanager
def translate(
    framework: Framework, xs: list[Tensor], native: Any, attempted: str
) -> Generator[None, None, None]:
    """Raise d2ldev's error for a framework's exception in a copy of tensors."""
    try:
        yield
    except Exception as error:
        if (ours := copy_refusal(framework, error, attempted, native, xs)) is None:
            raise
        raise ours from error


def _tensors_of_data(
    framework: Framework,
    flat: Flattened,
    leaves: dict[int, Any],
    device: Device,
    attempted: str,
) -> dict[int, Tensor]:
    """Make tensors with the values of NumPy arrays and of other frameworks' tensors, by their ids.

    Text stays as it is.

    Args:
        framework: makes the tensors.
        flat: the nesting, which names a leaf.
        leaves: the data among its leaves.
        device: where the tensors are made.
        attempted: the current operation, for messages.

    Raises:
        UnsupportedValueError: for any other leaf, and for a dtype that the framework does not have.
            The message names the leaf.
    """
    data = {key: leaf for key, leaf in leaves.items() if not is_text(leaf)}
    for leaf in data.values():
        is_object = framework.state.kinds[type(leaf)] is OBJECT
        if is_object or not (is_array(leaf) or _is_tensor(leaf)):
            raise leaf_refusal(framework, attempted, leaf, flat.name_of(leaf))
    made = {}
    for key, leaf in data.items():
        try:
            array = leaf if is_array(leaf) else to_numpy(framework_of_tensor(leaf), leaf)
            made[key] = creation.asarray(framework, array, None, device, None, None)
        except UnsupportedValueError as error:
            name = flat.name_of(leaf)
            problem = f"{describe(leaf)} at {name or 'the top'}: {error.problem}"
            raise UnsupportedValueError(attempted, problem, error.fix) from error
    return made


def is_array(x: Any) -> bool:
    """Return whether a value is an array of NumPy."""
    return is_of_numpy(type(x), "ndarray")


def _is_tensor(x: Any) -> bool:
    """Return whether a value is a tensor of any framework."""
    try:
        framework_of_tensor(x)
    except UnsupportedValueError:
        return False
    return True


def copy_refusal(
    framework: Framework, error: Exception, attempted: str, native: Any, x: Any
) -> D2LDevError | None:
    """Return d2ldev's error for a framework's exception in a copy of a tensor or a list of them.

    None if it is about something else: a driver may report work that was queued long before.
    """
    if isinstance(error, D2LDevError):
        return None
    is_refused = isinstance(error, (NotImplementedError, TypeError, ValueError))
    if not is_refused and not framework.devices.is_out_of_memory(error):
        xs = x if isinstance(x, list) else [x]
        if all(_is_plain(framework, each) for each in xs):
            return None
    fix = "give it as a dense tensor of a dtype in backend.dtype_names"
    return creation.refusal(framework, error, attempted, native, fix)


def _is_plain(framework: Framework, x: Any) -> bool:
    """Tell whether a tensor has a shape, one of the framework's dtypes, and bytes."""
    try:
        shape = creation.shape_of(x, "copy a tensor")
        if is_array(x):
            return True
        is_known = framework.tensors.dtype_of(x) in framework.tensors.dtype_names
    except Exception:
        return False
    try:
        return is_known and (0 in shape or framework.tensors.address(x) != 0)
    except UnsupportedValueError:
        return False
    except Exception:  # the queued work that makes it has failed
        return True


def leaf_refusal(framework: Framework, attempted: str, x: Any, name: str) -> UnsupportedValueError:
    """Return the error of a value in a nesting that is not a tensor of the framework.

    Args:
        framework: the one that was asked.
        attempted: the current operation, for messages.
        x: the value.
        name: its name in the nesting; empty is the whole.
    """
    is_plain = framework.state.kinds[type(x)] is PLAIN
    what = "a plain value" if is_plain else f"not a tensor of the {framework.name} backend"
    where = f" at {name}" if name else ""
    if method := framework.state.kinds.method_of(type(x), 0):
        what = f"an object that moves by its own {method}(), and shows nothing else of its tensors"
    fix = "backend.asarray(x, device=device) makes a tensor of numbers and NumPy arrays"
    if framework.state.kinds[type(x)] is OBJECT:
        fix = "model = backend.place(model, device) moves models and optimizers"
    elif hasattr(_export(x), "__dlpack__") and type(x).__module__ != "numpy":
        fix = "x = backend.from_dlpack(x) takes over another framework's tensor"
        if foreign := of_another_backend(framework, attempted, x, name, fix=fix):
            return foreign
    elif foreign := of_another_backend(framework, attempted, x, name):
        return foreign
    elif isinstance(x, Sharded):
        what = "the shard of a batch, which only fit takes, in a process of a launch"
        fix = "its operands: backend.prefetch((each.operands for each in data), device)"
    elif not hasattr(x, "__array__"):
        fix = f"d2ldev.register_container({type(x).__name__}, children, rebuild)"
        if name:
            fix = f"take it out of the batch, or {fix}"
        elif framework.state.kinds[type(x)] not in (OBJECT, PLAIN, TENSOR, UNKNOWN):
            fix = "give each tensor in it, or x = backend.asarray(x) of numbers"
    problem = f"{describe(x)}{where} is {what}"
    return UnsupportedValueError(attempted, problem, fix)


def _is_on_the_host(x: Any) -> bool:
    # Not at the top: a program without DLPack need not pay for importing ``ctypes``.
    from d2ldev.operations.dlpack import ON_CPU

    kind, _ = _export(x).__dlpack_device__()
    return int(kind) == ON_CPU


def _export(x: Any) -> Any:
    """Return the object with ``__dlpack__`` for a value: itself, or its backend's substitute."""
    if hasattr(x, "__dlpack__"):
        return x
    try:
        return framework_of_tensor(x).tensors.dlpack_of(x)
    except UnsupportedValueError:
        return x
