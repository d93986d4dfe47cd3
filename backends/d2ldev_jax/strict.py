"""Strict: JAX refuses arrays that are committed to different devices, and d2ldev names them.

d2ldev commits every array that it makes, moves, places or loads. JAX moves all other operands to
the device of the committed ones, also in a block. Examples are the array of a ``jnp.ones``,
numbers, and NumPy's arrays. JAX also moves the arrays in the closure of a jitted function, and the
arguments that ``in_shardings`` names. A function that was compiled ahead of time raises JAX's own
error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
from jax._src import pjit, stages

from d2ldev import Device
from d2ldev.framework import Devices, Operand, Strict, mismatch, replace

if TYPE_CHECKING:
    from d2ldev.framework import Watch

_OF_JAX = os.path.dirname(str(jax.__file__)) + os.sep


class JaxStrict(Strict):
    """Raise JAX's own refusal in d2ldev's words, and change nothing else.

    Args:
        devices: the devices of the framework.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def follow(self, watch: Watch) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        from d2ldev_jax.leaks import Follower  # only a search for leaks needs it

        return Follower(
            watch, self._devices.native(watch.device), self._devices.from_native
        ).follow()

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        # JAX calls it once for each function and the devices of its arguments, also to lower it.
        lower = pjit._resolve_and_lower

        @functools.wraps(lower)
        def lower_or_raise(args: Iterable[Any], *others: Any, **options: Any) -> Any:
            try:
                return lower(args, *others, **options)
            except stages.DeviceAssignmentMismatchError as error:
                (fails,) = error.args
                args, name, names = list(args), options["name"], _names_of(options["jaxpr"])
                operands = self._operands(args, names, fails) if in_force() else []
                if len({device for _, device in operands}) < 2:
                    raise
                message = stages._device_assignment_mismatch_error(name, fails, args, "jit", names)
                raise mismatch(name, operands) from ValueError(message)

        return replace([(pjit, "_resolve_and_lower", lower_or_raise)])

    def _operands(self, args: Sequence[Any], names: Sequence[str], fails: Any) -> list[Operand]:
        """Return the arguments that are committed to the devices in JAX's error."""
        places = [device for fail in fails if (device := self._only(fail.da))]
        found: list[Operand] = []
        for index, (x, name) in enumerate(zip(args, names, strict=True)):
            # Newer releases pass descriptions of the arguments.
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, jax.sharding.Sharding) and getattr(x, "committed", True):
                device = self._only(sharding.device_set)
                found += [(name or index, device)] if device in places else []
        unnamed = [device for device in places if device not in [known for _, known in found]]
        return [*found, *((len(args) + i, each) for i, each in enumerate(unnamed))]

    def _only(self, natives: Collection[jax.Device]) -> Device | None:
        """Return the ``Device`` of JAX's device; None for several devices."""
        return self._devices.from_native(next(iter(natives))) if len(natives) == 1 else None


def _names_of(jaxpr: Any) -> list[str]:
    """Return the user's names of a function's arguments, which are empty for a function of JAX.

    The user's program has no variables with the names of JAX's parameters. The arrays of a
    function's closure come first, without names.
    """
    described = getattr(jaxpr, "jaxpr", jaxpr).debug_info
    known = described.arg_names or ()
    is_of_jax = str(described.func_filename).startswith(_OF_JAX)
    names = [] if is_of_jax else ["" if name is None else str(name) for name in known]
    return [*[""] * (len(jaxpr.in_avals) - len(names)), *names]
