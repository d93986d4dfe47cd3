"""Strict: JAX refuses arrays that are committed to different devices, and d2ldev names them.

Every array that d2ldev makes, moves, places or loads is committed. JAX moves everything else to the
device of the others, in a block as elsewhere: an array that ``jnp.ones`` has made, numbers, and
NumPy's arrays. It also moves what a jitted function closes over, and what ``in_shardings`` names.
The error of a function that was compiled ahead of time stays JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax._src import stages

from d2ldev.device import Device
from d2ldev.framework import Devices, Strict
from d2ldev.operations.mixing import Operand, mismatch, replace


class JaxStrict(Strict):
    """JAX's own refusal, raised in d2ldev's words; nothing else is changed.

    Args:
        devices: the room of devices.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

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
        """Return the arguments that are committed to the devices of which JAX complains.

        While JAX traces, as in ``jax.grad``, an argument has neither a device nor a name.
        """
        places = [device for fail in fails if (device := self._only(fail.da))]
        # JAX puts the arrays that a function closes over first, and has no names for them.
        every_name = [*[""] * (len(args) - len(names)), *names]
        found = []
        for index, (x, name) in enumerate(zip(args, every_name, strict=False)):
            # Newer releases hand over descriptions of the arguments, and not the arguments.
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, jax.sharding.Sharding) and getattr(x, "committed", True):
                device = self._only(sharding.device_set)
                found += [(name or f"operand_{index}", device)] if device in places else []
        unnamed = [device for device in places if device not in [known for _, known in found]]
        return [*found, *((f"operand_{len(args) + i}", each) for i, each in enumerate(unnamed))]

    def _only(self, natives: Collection[jax.Device]) -> Device | None:
        """Return the device that a single one of JAX's stands for; None if there are several."""
        return self._devices.from_native(next(iter(natives))) if len(natives) == 1 else None
