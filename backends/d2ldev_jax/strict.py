"""What ``strict()`` adds to JAX, which refuses arrays that are *committed* to different devices.

JAX's own error of those is raised as a ``DeviceMismatchError``. An array that is not committed, as
``jnp.ones`` makes it, JAX moves to where the others are without a word; here it counts as being
where its bytes are. No operands are:

- Python numbers, NumPy's scalars and arrays, which have no device;
- an array of shape ``()`` that is not committed and is on the CPU or on JAX's default device:
  ``jnp.float32(3)``, the count of steps in an optimizer's state, ``jax.random.key(0)``. A number
  that d2ldev made is committed, and JAX refuses it elsewhere;
- what JAX, Flax or Optax make in the course of a function that was given arrays of one device
  (``provenance.py``). C++ is not left such calls: eager ``x.at[0].set(1.0)`` and ``x[indices]`` of
  NumPy's take up to twice their time where ``x`` is not on the default device;
- arrays that are spread over several devices, and what ``jax.jit`` was told to take to a place by
  ``in_shardings``.

Two arrays look like the user's and are JAX's: NumPy's that ``jnp.concatenate``, ``stack``,
``array_equal``, ``union1d`` or ``isin`` has made an array of by itself, and what
``jnp.zeros_like(x)`` is in a function that ``jax.grad`` runs without ``jit``, on the default device
and not where ``x`` is. They raise; ``with backend.on(device):`` makes them where they belong.

An array that a jitted function closes over is an operand. So is one that a function takes from
around it which ``scan``, ``cond``, ``jax.checkpoint`` or ``nnx.remat`` trace: from a variable, a
nesting, a module of nnx, another function. Move it before and not in there: most of these hand it
over as it is. What is not committed, and an attribute of an object of any other class, they move
unseen.

A function that was compiled ahead of time (``jax.jit(f).lower(...).compile()``) has its device
already; what is given to it is moved there unless it is committed, also here.

**How it costs nothing.** A call with operands of a kind that were seen before is done in C++, and
never comes by here. Which kinds were seen is kept by JAX for each state of its settings. So there
is one more of them, which is another in a block: all that was seen outside is not seen yet, and
what mixes devices is not let in. Nothing is traced or compiled again for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
from jax._src import config, pjit, stages
from jax._src.sharding_impls import UnspecifiedValue

from d2ldev.device import Device
from d2ldev.errors import DeviceMismatchError
from d2ldev.interface import Backend
from d2ldev.operations.strictness import Operand, mismatch, replace
from d2ldev_jax.provenance import given_arrays, is_going_backward

# As JAX says it of two arguments: the name, the operation, and the first of the devices.
_ARGUMENT = re.compile(
    r"argument (\S+) of (.+?) with shape \S+ and (?:with )?device ids \[(\d+)[^]]*\] "
    r"on platform (\w+)"
)


def refuse_mixing(backend: Backend) -> Callable[[], None]:
    """Have the calls that JAX has not seen yet looked at; returns what ends that.

    In all threads: whether one of them is in a block is asked when devices are mixed.
    """
    run, describe = pjit._pjit_call_impl_python, stages._device_assignment_mismatch_error
    setting = _setting()
    put_back = replace(
        [
            (pjit, "_pjit_call_impl_python", _looking(backend, run, describe)),
            (stages, "_device_assignment_mismatch_error", _translating(backend, describe)),
        ]
    )
    setting.set_global(True)

    def restore() -> None:
        setting.set_global(False)
        put_back()

    return restore


@cache
def _setting() -> Any:
    """A setting of JAX's that nothing reads, made with the process's first block."""
    new = config.config_ext.Config
    try:
        return new("d2ldev_strict", False, include_in_jit_key=True, include_in_trace_context=False)
    except TypeError:  # before JAX 0.7 they have no names
        return new(False, include_in_jit_key=True)


def mismatch_in(backend: Backend, error: BaseException) -> DeviceMismatchError | None:
    """What an error of JAX's says about mixed devices; None if it is another."""
    found = _ARGUMENT.findall(str(error)) if isinstance(error, ValueError) else []
    operands: list[Operand] = []
    for name, _, number, platform in found:
        for native in jax.local_devices(backend=platform.lower()):
            device = backend._from_native(native) if native.id == int(number) else None
            operands += [(name, device)] if device else []
    return mismatch(found[0][1], operands) if _are_mixed(operands) else None


def _looking(
    backend: Backend, run: Callable[..., Any], describe: Callable[..., str]
) -> Callable[..., Any]:
    """``run`` executes what C++ could not; what it returns says whether C++ may do it next time."""

    def look_and_run(*args: Any, **params: Any) -> Any:
        jaxpr, specified = params["jaxpr"], params["in_shardings"]
        names = getattr(jaxpr, "jaxpr", jaxpr).debug_info.arg_names or ()
        unspecified = [
            x if isinstance(place, UnspecifiedValue) else None
            for x, place in zip(args, specified, strict=True)
        ]
        closed_over = _operands(backend, jaxpr.consts, _numbered(jaxpr.consts))
        operands = [*_operands(backend, unspecified, names), *closed_over]
        if not _are_mixed(operands):
            return run(*args, **params)
        # Without a program to remember, C++ will ask again.
        if not backend._strictness.in_force():
            return _unremembered(run(*args, **params))
        # What JAX refuses of its own accord has its error as the cause.
        arrays = [x for x in args if getattr(x, "_committed", False)]
        if len({x.sharding for x in arrays}) > 1:
            try:
                return _unremembered(run(*args, **params))
            except stages.DeviceAssignmentMismatchError as error:
                own = ValueError(describe(params["name"], error.args[0], arrays, "jit", None))
            raise mismatch(params["name"], operands) from own
        if not is_going_backward():
            given = [*_operands(backend, given_arrays(backend), ()), *closed_over]
            if _are_mixed(given):
                raise mismatch(params["name"], operands)
        return _unremembered(run(*args, **params))

    return look_and_run


def _unremembered(result: tuple[Any, ...]) -> tuple[Any, ...]:
    out, _, *others = result
    return (out, None, *others)


def _translating(backend: Backend, describe: Callable[..., str]) -> Callable[..., str]:
    """``describe`` makes the message of the error that JAX is about to raise."""

    def describe_or_raise(
        name: str, fails: Any, args: Any, api: str, names: Sequence[str] | None
    ) -> str:
        args = list(args)
        message = describe(name, fails, args, api, names)
        if backend._strictness.in_force():
            operands = _operands(backend, args, names or ())
            if _are_mixed(operands):
                raise mismatch(name, operands) from ValueError(message)
        return message

    return describe_or_raise


def _numbered(consts: Sequence[Any]) -> list[str]:
    return [f"closed_over_{index}" for index in range(len(consts))]


def _operands(backend: Backend, args: Sequence[Any], names: Sequence[str | None]) -> list[Operand]:
    """The arguments that have a place of their own, by name.

    Where there are more arguments than names, the last ones have them: JAX puts what a function
    closes over first.
    """
    unnamed = max(0, len(args) - len(names))
    every_name = [*[None] * unnamed, *names]
    found = []
    for index, (x, name) in enumerate(zip(args, every_name, strict=False)):
        device = _device_of(backend, x)
        if device is not None:
            found.append((name or f"operand_{index}", device))
    return found


def _device_of(backend: Backend, x: Any) -> Device | None:
    """Where an argument is; None if it is no operand that has one place."""
    # Newer releases hand over what they know of the arguments, and not these, to the error.
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or isinstance(x, jax.core.Tracer):
        return None
    natives = getattr(sharding, "_internal_device_list", None) or sharding.device_set
    if len(natives) != 1:
        return None
    device = backend._from_native(next(iter(natives)))
    if isinstance(x, jax.Array) and not x.shape and not x.committed:  # type: ignore[attr-defined]
        return None if device in (Device("cpu"), backend.default_device()) else device
    return device


def _are_mixed(operands: Sequence[Operand]) -> bool:
    return len({device for _, device in operands}) > 1
