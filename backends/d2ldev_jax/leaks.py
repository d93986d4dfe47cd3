"""Follow the arrays that functions of JAX create, move and read, to find leaks of devices.

An array that ``jnp.ones`` makes is not committed. JAX moves it to the device of the others, which
is right. Arrays that a test makes are committed to the inputs' device. A library leaks where it
commits an array to another one, as ``jax.device_put`` does. JAX refuses to compute with both. The
search names the line of the library, moves the array, and computes.

- JAX compiles a function for the devices of its arguments. It looks for them in Python once, and
  then runs the function in C++, past Python. So the search sees each first call, and with it each
  refusal, at no cost. While an array of the library is elsewhere, it sees all calls. JAX then
  forgets what it runs in C++.
- A traced function has no devices, and runs as it is. Its call is one operation.
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
from jax._src import dispatch, pjit
from jax._src.array import ArrayImpl
from jax._src.lib import _jax

from d2ldev import Device, DeviceMismatchError
from d2ldev.framework import CPU, Watch, replace
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
_CALL = "_pjit_call_impl_python"
_READS = ("__array__", "item", "tolist", "__float__", "__int__", "__bool__", "__complex__")
# Functions that look at an array, or copy it, and compute nothing.
_LOOKS = frozenset(
    ("copy", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "expand_dims")
)


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
        # The host, which a test may name for its inputs.
        self._host = next(x for x in jax.devices("cpu") if from_native(x) is CPU)
        self._commits = False

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
            (pjit, _CALL, self._follow_call(vars(pjit)[_CALL])),
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
            entered.callback(replace(replacements))
            self._see_all_calls()
            yield self.place

    def place(self, values: dict[str, Any]) -> None:
        """Commit the arrays among the values of a dict to the device.

        Those that a library has left elsewhere stay there.
        """
        self._watch.note_toolboxes(values.values())
        for name, value in list(values.items()):
            if _is_concrete(value):
                values[name] = self._place_array(value)
            elif isinstance(value, (list, tuple, dict)) and type(value) in (list, tuple, dict):
                placed = jax.tree.map(
                    self._place_array,
                    value,
                    is_leaf=lambda x: not isinstance(x, (list, tuple, dict)),
                )
                values[name] = placed

    def _place_array(self, x: Any) -> Any:
        return self._commit(x) if _is_concrete(x) and not self._watch.is_left(x) else x

    def _commit(self, x: Any) -> Any:
        self._watch.has_inputs = True
        self._commits = True  # and the library moves nothing
        try:
            return jax.device_put(x, self._native)
        finally:
            self._commits = False

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
            device, is_named = self._device_of(made), kwargs.get("device") is not None
            may_be_input = device is None or (device == self._host and is_named)
            if may_be_input and self._makes_input(frame):
                return self._commit(made)
            if device is not None and is_named:  # it is not the device of an operand
                self._note(made, frame, "creates")
            return made

        return make

    def _makes_input(self, frame: FrameType) -> bool:
        if self._frames.is_test(frame):
            return True
        return self._watch.is_input(frame) and not self._watch.is_kept(frame)

    def _follow_put(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def device_put(*xs: Any, **options: Any) -> Any:
            made = function(*xs, **options)
            frame = self._frames.nearest(sys._getframe(1))
            return [self._put(x, moved, frame) for x, moved in zip(xs, made, strict=True)]

        return device_put

    def _follow_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def put_batch(aval: Any, sharding: Any, xs: Any, *options: Any) -> Any:
            moved = function(aval, sharding, xs, *options)
            return self._put(xs[0], moved, self._frames.nearest(sys._getframe(1)))

        return put_batch

    def _put(self, x: Any, moved: Any, frame: FrameType | None) -> Any:
        """Return an array that was put on a device: on the inputs' device if it is an input."""
        device = self._device_of(moved)
        if frame is None or device is None or self._commits:
            return moved
        stray = self._watch.find_stray(x)
        if stray is not None and not self._frames.is_test(frame):
            if device != self._native:
                self._watch.inherit(moved, stray)
            elif stray.operation:
                place = self._from_native(self._device_of(x))
                self._watch.report("move", stray, place, stray.operation, None)
            return moved
        was_there = self._device_of(x) == self._native
        if device == self._host and (
            self._frames.is_test(frame) if was_there else self._makes_input(frame)
        ):
            return self._commit(moved)
        self._note(moved, frame, "moves" if was_there else "creates")
        return moved

    def _note(self, x: Any, frame: FrameType, action: str) -> None:
        if self._device_of(x) == self._native:
            self._watch.has_inputs = True
        elif not self._frames.is_test(frame):
            is_first = not self._watch.strays
            self._watch.note_stray(x, frame, action, is_suspect=self._watch.is_kept(frame))
            if is_first:
                self._see_all_calls()

    # -- meet -------------------------------------------------------------------------------------

    def _see_all_calls(self) -> None:
        """Let JAX forget what it runs in C++, but not what it has compiled."""
        if self._watch.strays:
            _jax.PjitFunctionCache.clear_all()

    def _follow_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Follow the calls that JAX makes in Python; each gets a flat list of arrays."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            watch = self._watch
            if not watch.has_inputs:
                watch.has_inputs = any(self._device_of(x) == self._native for x in args)
            frame = self._frames.nearest(sys._getframe(1))
            name = str(options["name"]).strip("_")
            found = [stray for x in args if (stray := watch.find_stray(x)) is not None]
            if found and (frame is None or self._frames.is_test(frame)):
                watch.report_results(found, name)
            try:
                results = function(*args, **options)
            except DeviceMismatchError:
                elsewhere = [x for x in args if self._device_of(x) not in (None, self._native)]
                if not elsewhere or all(self._device_of(x) != self._native for x in args):
                    raise
                watch.report_operands(elsewhere, name, frame)
                ids = {id(x) for x in elsewhere}
                moved = [self._commit(x) if id(x) in ids else x for x in args]
                results = function(*moved, **options)
            else:
                if not watch.strays:
                    return results
                if found:
                    made = [x for x in results[0] if self._device_of(x) not in (None, self._native)]
                    watch.pass_on(found, made, name, frame, computes=name not in _LOOKS)
            # Without what would run in C++ the next time.
            return results[0], None, *results[2:]

        return call

    # -- read -------------------------------------------------------------------------------------

    def _follow_read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")

        @functools.wraps(function)
        def read(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_concrete(x):
                return function(x, *args, **kwargs)
            self._watch.note_read(x, name, self._frames.nearest(sys._getframe(1)))
            return function(x, *args, **kwargs)

        return read


def _is_concrete(x: Any) -> bool:
    return isinstance(x, ArrayImpl)
