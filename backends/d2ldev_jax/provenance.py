"""Whether arrays that mix were given to an operation, or made by JAX in the course of it.

Some functions of JAX's, Flax's and Optax's make an array on the default device and compute with it
and their argument: the indices of ``x.at[0].set(1.0)``, the zeros of dropout, the seed from which
``jax.grad`` goes backward. Nobody wrote that mixing, and nobody could write it otherwise.

JAX does not keep who made an array. But a Python function of a library's that was called by
somebody else has its arguments: where those agree, what mixes further in was made there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

import jax

from d2ldev.interface import Backend

_LIBRARIES = ("jax", "flax", "optax")
# They only call what they were given.
_TRANSPARENT = (contextlib.__file__, functools.__file__)
# ``backward_pass`` until JAX 0.7, which goes by their results.
_BACKWARD = ("backward_pass", "backward_pass3")
# What tracers of ``grad``, ``jvp``, ``linearize`` and ``vmap`` call the array that they stand for.
_TRACED = ("primal", "val")
_FUNCTIONS = (FunctionType, MethodType, partial)


def is_going_backward() -> bool:
    """Whether ``jax.grad`` or ``jax.vjp`` is computing gradients from what it has computed."""
    return any(frame.f_code.co_name in _BACKWARD and _is_a_librarys(frame) for frame in _frames())


def given_arrays(backend: Backend) -> list[Any]:
    """The arrays that were given to the library's function that is running."""
    entry = None
    for frame in _frames():
        if _is_a_librarys(frame):
            entry = frame
        elif entry is not None and frame.f_code.co_filename not in _TRANSPARENT:
            break
    if entry is None:
        return []
    arguments = inspect.getargvalues(entry)
    # ``self`` may have been among those of no name.
    named = {*arguments.args, arguments.varargs, arguments.keywords, "self"}
    values = [value for name, value in arguments.locals.items() if name in named]
    # ``jax.checkpoint(f)`` was given ``f`` before, and holds it.
    before = [arguments.locals.get(name) for name in entry.f_code.co_freevars]
    values += [value for value in before if isinstance(value, _FUNCTIONS)]
    return [_concrete(x) for x in _arrays_in(backend, values, set())]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_a_librarys(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_folders())


def _folders() -> tuple[str, ...]:
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    return tuple(os.path.dirname(str(module.__file__)) + os.sep for module in modules)


def _is_object(backend: Backend, x: Any) -> bool:
    return isinstance(x, backend.object_types)


def _arrays_in(backend: Backend, values: Any, seen: set[int]) -> list[Any]:
    """The arrays, and what stands for one, in nestings, objects and functions."""
    leaves = jax.tree.leaves(values, is_leaf=partial(_is_object, backend))
    return [x for leaf in leaves for x in jax.tree.leaves(_opened(backend, leaf, seen))]


def _opened(backend: Backend, x: Any, seen: set[int]) -> Any:
    """The arrays that an argument holds, where it is none itself."""
    if _is_object(backend, x):  # of nnx
        return list(backend.named_tensors(x).values())
    if getattr(x, "scope", None) is not None and hasattr(x, "variables"):  # a module of linen's
        return x.variables
    if isinstance(x, _FUNCTIONS):
        return _arrays_in(backend, _held(backend, x, seen), seen)
    if hasattr(x, "index") and hasattr(x, "array"):  # ``x.at[i]``, of which ``set`` is a method
        return [x.array, x.index]
    return x


def _held(backend: Backend, function: Any, seen: set[int]) -> list[Any]:
    """What a function has besides its arguments; of a library's, the functions that it wraps."""
    if id(function) in seen:
        return []
    seen.add(id(function))
    if isinstance(function, MethodType):
        held: list[Any] = [function.__self__, function.__func__]
    elif isinstance(function, partial):
        held = [function.func, function.args, function.keywords]
    elif function.__code__.co_filename.startswith((*_folders(), *_TRANSPARENT)):
        cells = inspect.getclosurevars(function).nonlocals.values()
        return [x for x in cells if isinstance(x, _FUNCTIONS)]
    else:
        found = inspect.getclosurevars(function)
        held = [*found.nonlocals.values(), *found.globals.values()]
    # Whatever else there is, such as a module, is not asked what it has.
    wanted = (*backend.tensor_types, *backend.object_types, *_FUNCTIONS)
    return [leaf for x in held for leaf in _leaves(backend, x) if isinstance(leaf, wanted)]


def _leaves(backend: Backend, x: Any) -> list[Any]:
    try:
        leaves: list[Any] = jax.tree.leaves(x, is_leaf=partial(_is_object, backend))
    except (TypeError, ValueError):  # a dict that JAX cannot sort
        return []
    return leaves


def _concrete(x: Any) -> Any:
    """The array that a tracer stands for, where it stands for one."""
    while isinstance(x, jax.core.Tracer):
        inner = [getattr(x, name) for name in _TRACED if hasattr(x, name)]
        if not inner:
            break
        x = inner[0]
    return x
