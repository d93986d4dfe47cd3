"""Strict: JAX refuses arrays that are committed to different devices, and d2ldev names them.

Every array that d2ldev makes, moves, places or loads is committed. What is not committed JAX takes
to where the others are, in a block as elsewhere: an array that ``jnp.ones`` has made, numbers, and
NumPy's arrays. So do a jitted function with an array that it closes over, ``in_shardings``, and a
function that was compiled ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax._src import stages

from d2ldev.framework import Devices, Strict
from d2ldev.operations.mixing import Operand, mismatch, replace


class JaxStrict(Strict):
    """The error that JAX is about to raise, in d2ldev's words; nothing is changed but that.

    Args:
        devices: the room of devices.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        describe = stages._device_assignment_mismatch_error

        def describe_or_raise(
            name: str, fails: Any, args: Iterable[Any], api: str, names: Sequence[str] | None
        ) -> str:
            args = list(args)
            message = describe(name, fails, args, api, names)
            operands = list(self._operands(args, names or ())) if in_force() else []
            if len({device for _, device in operands}) > 1:
                raise mismatch(name, operands) from ValueError(message)
            return message

        return replace([(stages, "_device_assignment_mismatch_error", describe_or_raise)])

    def _operands(self, args: Sequence[Any], names: Sequence[str]) -> Iterator[Operand]:
        """Yield the arguments that are committed to one device."""
        # JAX puts what a function closes over first, and has no names for it.
        every_name = [*[""] * (len(args) - len(names)), *names]
        for index, (x, name) in enumerate(zip(args, every_name, strict=False)):
            # Newer releases hand over what they know of the arguments, and not these.
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, jax.sharding.Sharding) or not getattr(x, "committed", True):
                continue
            natives = [self._devices.from_native(each) for each in sharding.device_set]
            if len(natives) == 1 and natives[0] is not None:
                yield name or f"operand_{index}", natives[0]
