"""Follow the arrays that functions of JAX create, move and read, to find leaks of devices.

An array that ``jnp.ones`` makes is not committed. JAX moves it to the device of the others, which
is right. Arrays that a test makes are committed to the inputs' device. A library leaks where it
commits an array to another one, as ``jax.device_put`` does. JAX refuses to compute with both. The
search names the line of the library, and the test ends there.

A traced function has no devices, and runs as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.random
import numpy as np
from jax._src import dispatch, stages
from jax._src.array import ArrayImpl

from d2ldev import Device, DeviceMismatchError
from d2ldev.framework import Stray, Watch, replace
from d2ldev_jax import tensors

_MAKERS: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (
        jnp,
        (
            *("array", "asarray", "zeros", "ones", "empty", "full", "arange", "linspace", "eye"),
            *("logspace", "identity", "frombuffer", "from_dlpack", "tri", "diag"),
        ),
    ),
    (
        jax.random,
        ("PRNGKey", "key", "normal", "uniform", "randint", "bernoulli", "permutation", "choice"),
    ),
)
_PUT = "_batched_device_put_impl"
_REFUSE = "_device_assignment_mismatch_error"
_READS = ("__array__", "item", "tolist", "__float__", "__int__", "__bool__", "__complex__")


class Follower:
    """Shows a watch the arrays that functions of JAX create, move and read.

    Args:
        watch: what is known of the arrays.
        native: the device of the inputs.
        from_native: what d2ldev calls a device.
    """

    def __init__(
        self, watch: Watch, native: jax.Device, from_native: Callable[[Any], Device | None]
    ) -> None:
        self._watch, self._frames = watch, watch.frames
        self._native, self._from_native = native, from_native

    @contextmanager
    def follow(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Follow what is done with arrays, in ``strict()`` and with the device as the default.

        The block gets a function that commits inputs that were made before.
        """
        # What ``jax.device_put`` calls, whatever a library imports it as: the first in traced
        # functions and in older versions. The last is what d2ldev's own moves call.
        replacements: list[tuple[Any, str, Any]] = [
            (dispatch.device_put_p, "impl", self._follow_put(dispatch.device_put_p.impl)),
            (dispatch, _PUT, self._follow_put(vars(dispatch)[_PUT])),
            (tensors, "batched_device_put", self._follow_batch(tensors.batched_device_put)),
        ]
        for module, names in _MAKERS:
            replacements += [
                (module, name, self._follow_maker(vars(module)[name]))
                for name in names
                if name in vars(module)
            ]
        replacements += [
            (ArrayImpl, name, self._follow_read(vars(ArrayImpl)[name]))
            for name in _READS
            if name in vars(ArrayImpl)
        ]
        # NumPy reads an array of the host's memory past ``__array__``.
        replacements += [
            (np, name, self._follow_read(vars(np)[name]))
            for name in ("array", "asarray", "asanyarray")
        ]
        with ExitStack() as entered:
            entered.enter_context(self._watch.be_strict())
            entered.enter_context(jax.default_device(self._native))
            # ``strict()`` has replaced it already, by a function that raises the error.
            refuse = vars(stages)[_REFUSE]
            replacements.append((stages, _REFUSE, self._follow_refusal(refuse)))
            entered.callback(replace(replacements))
            yield self.place

    def place(self, values: dict[str, Any]) -> None:
        """Commit the arrays among the values of a dict to the device."""
        for name, value in list(values.items()):
            if _is_concrete(value):
                values[name] = self._commit(value)
            elif isinstance(value, (list, tuple, dict)) and type(value) in (list, tuple, dict):
                placed = jax.tree.map(
                    lambda x: self._commit(x) if _is_concrete(x) else x,
                    value,
                    is_leaf=lambda x: not isinstance(x, (list, tuple, dict)),
                )
                values[name] = placed

    def _commit(self, x: Any) -> Any:
        self._watch.has_inputs = True
        return jax.device_put(x, self._native)

    def _device_of(self, x: Any) -> Any:
        """Return the one device that an array is committed to; None if it is not committed."""
        if not _is_concrete(x) or not x.committed or len(x.devices()) != 1:
            return None
        return next(iter(x.devices()))

    def _follow_maker(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            if not _is_concrete(made):
                return made
            frame = self._frames.nearest(sys._getframe(1))
            if frame is None:
                return made
            device = self._device_of(made)
            if device is None:
                is_input = self._frames.is_test(frame) or self._watch.is_input(frame)
                return self._commit(made) if is_input else made
            if kwargs.get("device") is not None:  # not the device of an operand
                self._note(made, device, frame, "creates")
            return made

        return make

    def _follow_put(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def device_put(*xs: Any, **options: Any) -> Any:
            made = function(*xs, **options)
            for x, moved in zip(xs, made, strict=True):
                self._note_move(x, moved, sys._getframe(1))
            return made

        return device_put

    def _follow_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def put_batch(aval: Any, sharding: Any, xs: Any, *options: Any) -> Any:
            moved = function(aval, sharding, xs, *options)
            self._note_move(xs[0], moved, sys._getframe(1))
            return moved

        return put_batch

    def _note_move(self, x: Any, moved: Any, caller: FrameType) -> None:
        frame = self._frames.nearest(caller)
        if frame is not None and (device := self._device_of(moved)) is not None:
            action = "moves" if self._device_of(x) == self._native else "creates"
            self._note(moved, device, frame, action)

    def _note(self, x: Any, device: Any, frame: FrameType, action: str) -> None:
        if device == self._native:
            self._watch.has_inputs = True
        elif not self._frames.is_test(frame):
            self._watch.note_stray(x, frame, action)

    def _follow_read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")

        @functools.wraps(function)
        def read(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_concrete(x):
                return function(x, *args, **kwargs)
            frame = self._frames.nearest(sys._getframe(1))
            if frame is not None:
                if not self._frames.is_test(frame):
                    if self._device_of(x) == self._native:
                        line = self._frames.line(frame)
                        self._watch.report_line("read", line, "reads", self._watch.device, name)
                elif (stray := self._watch.find_stray(x)) is not None:
                    place = self._from_native(self._device_of(x))
                    self._watch.report("result", stray, place, name, None)
            return function(x, *args, **kwargs)

        return read

    def _follow_refusal(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except DeviceMismatchError as error:  # which the library may catch
                self._explain(error, self._frames.nearest(sys._getframe(1)))
                raise

        return refuse

    def _explain(self, error: DeviceMismatchError, frame: FrameType | None) -> None:
        """Report the arrays of the library that an operation has refused."""
        found: list[tuple[Stray | None, Device | None]] = []
        for known in list(self._watch.strays.values()):
            device = self._from_native(self._device_of(known.tensor()))
            if str(device) in error.devices:
                found.append((known, device))
        operation = error.attempted.removeprefix("run ")
        is_test = frame is None or self._frames.is_test(frame)
        for stray, device in found or ([] if is_test else [(None, None)]):
            kind = "result" if is_test else "mix"
            self._watch.report(kind, stray, device, operation, frame)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, ArrayImpl)
