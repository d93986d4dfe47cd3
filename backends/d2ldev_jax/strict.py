"""Strict: JAX refuses arrays that are committed to different devices, and d2ldev names them.

d2ldev commits every array that it makes, moves, places or loads. JAX moves all other operands to
the device of the committed ones, also in a block. Examples are the array of a ``jnp.ones``,
numbers, and NumPy's arrays. JAX also moves the arrays in the closure of a jitted function, and the
arguments that ``in_shardings`` names. A function that was compiled ahead of time raises JAX's own
error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
from jax._src import stages

from d2ldev import Device
from d2ldev.framework import Devices, Operand, Strict, mismatch, replace

if TYPE_CHECKING:
    from d2ldev.framework import Watch


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
        describe = stages._device_assignment_mismatch_error

        def describe_or_raise(
            function: str, fails: Any, args: Iterable[Any], api: str, names: Sequence[str] | None
        ) -> str:
            args = list(args)
            message = describe(function, fails, args, api, names)
            operands = self._operands(args, names or (), fails) if in_force() else []
            if len({device for _, device in operands}) > 1:
                name = function.rpartition(".")[2]
                raise mismatch(name, operands) from ValueError(message)
            return message

        return replace([(stages, "_device_assignment_mismatch_error", describe_or_raise)])

    def _operands(self, args: Sequence[Any], names: Sequence[str], fails: Any) -> list[Operand]:
        """Return the arguments that are committed to the devices in JAX's error.

        During a trace, such as in ``jax.grad``, an argument has neither a device nor a name. JAX
        calls an argument of a function of its own ``args[0]``, and no variable has this name.
        """
        places = [device for fail in fails if (device := self._only(fail.da))]
        # The arrays of a function's closure come first, without names.
        every_name = [*[""] * (len(args) - len(names)), *names]
        found = []
        for index, (x, name) in enumerate(zip(args, every_name, strict=False)):
            # Newer releases pass descriptions of the arguments.
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, jax.sharding.Sharding) and getattr(x, "committed", True):
                device = self._only(sharding.device_set)
                named = name and not name.startswith("args[")
                operand = name if named else index
                found += [(operand, device)] if device in places else []
        unnamed = [device for device in places if device not in [known for _, known in found]]
        return [*found, *((len(args) + i, each) for i, each in enumerate(unnamed))]

    def _only(self, natives: Collection[jax.Device]) -> Device | None:
        """Return the ``Device`` of JAX's device; None for several devices."""
        return self._devices.from_native(next(iter(natives))) if len(natives) == 1 else None
