"""Values that no call expects, by name; and arguments that are right, by the parameter's name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import d2ldev
from d2ldev import Backend, Trainer
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.provision import hostile_tensors


class OwnError(Exception):
    """What a value itself raises, which a call may pass on; it has no text."""

    def __str__(self) -> str:
        raise AssertionError("the text of a value's own error was asked for")

    __repr__ = __str__


def _raise(*_: Any, **__: Any) -> Any:
    raise OwnError("so says the value")


class Hostile:
    """An object each of whose methods raises."""

    __init__ = _raise
    __hash__ = object.__hash__
    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __bool__ = __call__ = _raise
    __index__ = __int__ = __float__ = __complex__ = __array__ = __dlpack__ = __fspath__ = _raise
    __getitem__ = __contains__ = __lt__ = __add__ = __enter__ = __exit__ = _raise


def _make_broken(method: str, base: type = object, body: Callable[..., Any] = _raise) -> type:
    """Return a class with one method that raises, or breaks its contract."""
    return type(f"Broken{base.__name__}", (base,), {method: body})


BROKEN: dict[str, tuple[type, Any]] = {
    **{
        f"broken {name}": (_make_broken(f"__{name}__"), None)
        for name in ("repr", "str", "eq", "hash", "bool", "getattribute", "array", "iter", "fspath")
    },
    "broken length": (_make_broken("__len__", list), [1.0]),
    "negative length": (_make_broken("__len__", list, lambda _: -1), [1.0]),
    "length that is text": (_make_broken("__len__", list, lambda _: "1"), [1.0]),
    "huge length": (_make_broken("__len__", list, lambda _: 2**62), [1.0]),
    "list that cannot be gone through": (_make_broken("__iter__", list), [1.0]),
    "list without items": (_make_broken("__getitem__", list), [1.0]),
    "list without repr": (_make_broken("__repr__", list), [1.0]),
    "tuple that cannot be gone through": (_make_broken("__iter__", tuple), [1.0]),
    "dict without keys": (_make_broken("__iter__", dict), {"a": 1.0}),
    "dict without values": (_make_broken("values", dict), {"a": 1.0}),
    "dict without items": (_make_broken("__getitem__", dict), {"a": 1.0}),
    "text without str": (_make_broken("__str__", str), "a"),
    "text without repr": (_make_broken("__repr__", str), "a"),
    "text without eq": (_make_broken("__eq__", str), "a"),
    "text without hash": (_make_broken("__hash__", str), "a"),
    "integer without index": (_make_broken("__index__", int), 1),
    "integer without repr": (_make_broken("__repr__", int), 1),
    "integer without order": (_make_broken("__lt__", int), 1),
    "float without repr": (_make_broken("__repr__", float), 1.0),
    "array without repr": (_make_broken("__repr__", np.ndarray), 2),
    "array that cannot be gone through": (_make_broken("__iter__", np.ndarray), 2),
}
"""By name: a class of which one method is broken, and what an object is made of, if of anything."""


SHAPES = [
    *(
        (2**32, 2**31),
        (0, 2**63),
        (2**63, 0),
        (2**45,),
        (2**31, 2**31, 2**31),
        (-1, 2),
        (2, -(2**63)),
    ),
    *((1,) * 33, (1,) * 65, (0,) * 33, (1,) * 300, (2**64,), (None, 2), (2, True)),
]
"""Those that frameworks are known to end the process for, multiply wrongly, or take for another."""


MISFITS: list[tuple[Any, str]] = [
    *((0.25, name) for name in ("int32", "uint8", "bool")),
    *((float(text), name) for text in ("nan", "inf") for name in ("int32", "bool")),
    *((-1, "uint8"), (-1.0, "uint8"), (300.0, "uint8"), (2.0**31, "int32"), (2, "bool")),
    *((1e39, "float32"), (-1e39, "float32"), (10**39, "float32"), (1j, "float32"), (1j, "int32")),
]
"""Numbers and the dtypes that do not hold them, which some framework makes others of."""


def _make(cls: type, content: Any) -> Any:
    return cls() if content is None else cls(content)


class _Shaped:
    """What has a shape, and a dtype, and is not an array."""

    shape = (-1, None)
    dtype = "float99"
    ndim = 2
    __array__ = _raise


def _deep(make: Callable[[Any], Any]) -> Any:
    nested = make(1.0)
    for _ in range(100_000):
        nested = make(nested)
    return nested


def _cycle() -> list[Any]:
    cycle: list[Any] = [1.0]
    cycle.append({"again": cycle})
    return cycle


def _wide() -> list[Any]:
    """Return a small nesting that has 2**60 leaves, if it is gone through without care."""
    nested: list[Any] = [1.0]
    for _ in range(60):
        nested = [nested, nested]
    return nested


def _just(value: Any) -> Callable[[], Any]:
    return lambda: value


def _release() -> memoryview:
    view = memoryview(b"a")
    view.release()
    return view


def _generator() -> Iterator[int]:
    yield 1


def _hashable(x: Any) -> Any:
    try:
        hash(x)
    except Exception:
        return "a"
    return x


def values(backend: Backend) -> dict[str, Callable[[], Any]]:
    """Return builders of hostile values, by name; those of the backend's own tensors included."""
    made: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "True": lambda: True,
        **{f"number {number}": _just(number) for number in (-1, 0, 0.5, 2**62)},
        **{f"number {number}": _just(number) for number in (2**63, 2**64, -(2**70))},
        "number of 5000 digits": lambda: 10**5000,
        **{f"shape {shape}"[:60]: _just(shape) for shape in SHAPES},
        **{f"float {text}": _just(float(text)) for text in ("nan", "inf", "-inf")},
        "complex": lambda: 1j,
        **{f"text {text!r}": _just(text) for text in ("", "a", "\ud800", "\0", "gpu:x")},
        "long text": lambda: "a" * 100_000,
        **{f"bytes {data!r}": _just(data) for data in (b"", b"a", b"\xff")},
        "object": object,
        "class": lambda: int,
        "function": lambda: len,
        "module": lambda: np,
        "generator": _generator,
        **{f"number {number!r}": _just(number) for number in (Decimal("1.5"), Decimal("nan"))},
        **{f"number {number!r}": _just(number) for number in (Decimal("inf"), Fraction(1, 3))},
        **{
            f"scalar {scalar!r} of {scalar.dtype}": _just(scalar)
            for scalar in (np.int64(-1), np.uint64(2**64 - 1), np.float32("nan"), np.float64(0.5))
        },
        **{
            f"scalar of {scalar.dtype}": _just(scalar)
            for scalar in (np.bool_(True), np.float16(1), np.complex64(1j), np.longdouble(1))
        },
        "scalar of text": _just(np.str_("a")),
        "scalar of time": _just(np.datetime64("2020-01-01")),
        "scalar of record": lambda: np.zeros(2, [("a", "i4")])[0],
        "bytearray": lambda: bytearray(b"a"),
        "memoryview": lambda: memoryview(b"a"),
        "released memoryview": _release,
        "long range": lambda: range(10**15),
        "range of more than 2**63": lambda: range(2**64),
        "deque": lambda: deque([1.0]),
        "shaped": _Shaped,
        **{name: partial(_make, *how) for name, how in BROKEN.items()},
        "hostile": lambda: object.__new__(Hostile),
        "hostile class": lambda: Hostile,
        "cycle": _cycle,
        "deep list": lambda: _deep(lambda inner: [inner]),
        "deep tuple": lambda: _deep(lambda inner: (inner,)),
        "deep dict": lambda: _deep(lambda inner: {"a": inner}),
        "wide": _wide,
        "ragged": lambda: [[1.0], [1.0, 2.0]],
        "empty list": list,
        "empty dict": dict,
        "set": lambda: {1, "a"},
        "array of objects": lambda: np.array([None, object()]),
        "array of text": lambda: np.array(["a"]),
        "array of times": lambda: np.array(["2020-01-01"], "datetime64[s]"),
        "array of records": lambda: np.zeros(2, [("a", "i4")]),
        "array of lists": lambda: np.array([[1.0], [1.0, 2.0]], object),
        "array of other bytes": lambda: np.zeros((2, 2), ">f4")[::-1],
        "array without axes": lambda: np.zeros(()),
        "empty array": lambda: np.zeros((0, 3)),
        "array of 2**60 elements": lambda: np.broadcast_to(np.float32(1), (2**60,)),
        "tensor": lambda: backend.ones((2, 2)),
        "scalar tensor": lambda: backend.zeros(()),
        "empty tensor": lambda: backend.zeros((0, 3)),
        "tensor of another framework": lambda: d2ldev.get_backend("reference").ones(2),
        "device": lambda: d2ldev.gpu(99),
        "backend": lambda: backend,
        "model": lambda: backend.mlp([2, 1]),
    }
    if "mlp" in framework_of(backend).cannot:
        del made["model"]
    return {**made, **hostile_tensors(backend)}


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, x),
    "dict": lambda x: {"a": x},
    "key": lambda x: {_hashable(x): 1.0},
    "iterator": lambda x: iter([x]),
    "loader": lambda x: [(x, x)],
}


def right(backend: Backend, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return builders of arguments that are right, by the names of parameters."""
    path = folder / "right.safetensors"
    backend.save([backend.ones((2, 1))], path)

    def x() -> Any:
        return backend.ones((2, 2))

    def y() -> Any:
        return backend.zeros(2, dtype="int32")

    def batches() -> Any:
        return [(backend.ones((2, 2)), backend.ones((2, 1)))]

    def model() -> Any:
        return backend.mlp([2, 1])

    zeros = ("step", "seed", "epoch", "fill_value", "max_epochs", "rank", "seconds")
    numbers = dict.fromkeys(zeros, lambda: 0)
    return {
        **numbers,
        **dict.fromkeys(("batch_size", "start", "size"), lambda: 2),
        **dict.fromkeys(("x", "prediction"), x),
        **dict.fromkeys(("batch", "batches", "data", "train_data"), batches),
        **dict.fromkeys(("device", "spec"), lambda: "cpu"),
        "shape": lambda: (2, 2),
        "sizes": lambda: [2, 1],
        "obj": lambda: [backend.ones((2, 1))],
        "devices": lambda: ["cpu"],
        "path": lambda: path,
        "model": model,
        "y": y,
        "framework": lambda: framework_of(backend),
        "backend": lambda: backend,
        "loss": lambda: backend.ones(()),
        "history": dict,
        "state": dict,
        "function": lambda: lambda *_args, **_kwargs: None,
        **dict.fromkeys(("args", "kwargs"), lambda: 1),
        "arrays": lambda: np.zeros((2, 2)),
        "scalars": lambda: backend.ones(()),
        **dict.fromkeys(("shard", "batch_norm"), lambda: None),
    }


def owners(backend: Backend) -> dict[type, Callable[[], Any]]:
    """Return the classes whose public functions are called, and what makes one of each."""
    return {
        Backend: lambda: backend,
        Trainer: lambda: Trainer(1, backend=backend),
        d2ldev.ArrayLoader: lambda: d2ldev.ArrayLoader(np.zeros((2, 2)), batch_size=2),
        d2ldev.DeviceLog: lambda: d2ldev.DeviceLog(backend),
    }
