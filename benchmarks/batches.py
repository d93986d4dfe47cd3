"""Batches that really move, and copies of them: nestings of 3, 30 and 300 leaves of 4 floats.

Ours moves all or nothing, keeps ties, and takes any container. Theirs is what one would write
without d2ldev, in each way if there are several.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from measure import Comparison, Row

_SIZES = (3, 30, 300)
_FLOATS = 4


def torch_rows(backend: Any) -> Iterator[Row]:
    """Compare moves between two virtual GPUs, moves from the CPU, and copies on the CPU."""
    import torch
    from torch.utils._pytree import tree_map

    native = backend.native("gpu:1")
    names = {
        "torch": torch,
        "tree_map": tree_map,
        "native": native,
        "move": lambda x: x.to(native),
    }
    moves = {"torch's pytree": "tree_map(move, batch)"}
    copies = {"torch's pytree": "tree_map(torch.clone, batch)"}
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.utils import recursively_apply, send_to_device

        names |= {"send_to_device": send_to_device, "recursively_apply": recursively_apply}
        moves["accelerate"] = "send_to_device(batch, native)"
        copies["accelerate"] = "recursively_apply(torch.clone, batch)"
    if importlib.util.find_spec("lightning_fabric") is not None:
        from lightning_fabric.utilities import move_data_to_device

        names["move_data_to_device"] = move_data_to_device
        moves["Lightning Fabric"] = "move_data_to_device(batch, native)"
    one = ("x.to(native)", "x.clone()")
    yield from _rows(backend, names, moves, copies, one, 1.0, _nothing)
    yield from _copy_floors(backend)


def _copy_floors(backend: Any) -> Iterator[Row]:
    """Compare methods of Python that do little but ``x.clone()`` with it."""

    class Room:
        def copy(self, x: Any) -> Any:
            return x.clone()

    class Handle:
        def __init__(self) -> None:
            self.room, self.types = Room(), {type(x)}

        def copy(self, x: Any) -> Any:
            return self.room.copy(x)

        def copy_known(self, x: Any) -> Any:
            if type(x) not in self.types or not x.is_cpu:
                raise TypeError
            try:
                return self.room.copy(x)
            except RuntimeError as error:
                raise MemoryError from error

    x = backend.ones(_FLOATS)
    names = {"handle": Handle(), "x": x}
    for floor, ours in (
        ("a method that calls clone", "handle.copy(x)"),
        ("a method that checks x and its device, and calls clone", "handle.copy_known(x)"),
    ):
        yield Comparison(f"floor of copy on the CPU: {floor}", ours, "x.clone()", None, names)


def jax_rows(backend: Any) -> Iterator[Row]:
    """Compare with one ``device_put`` of the tree."""
    import jax

    names = {"jax": jax, "native": backend.native("gpu:1"), "cpu": backend.native("cpu")}
    # Waited for at the end of each sample. After each call a thread would have to wake Python, or
    # not, by how much Python still has to do, and that takes as long as a call. To wait for a
    # device takes longer than what is measured.
    made = names["made"] = []

    def wait() -> None:
        jax.block_until_ready(made)
        made.clear()

    add = "made.append({})"
    move = add.format("jax.device_put({}, native)")
    copy = add.format("jax.device_put({}, cpu, may_alias=False)")
    moves, copies = {"device_put": move.format("batch")}, {"device_put": copy.format("batch")}
    one = (move.format("x"), copy.format("x"))
    yield from _rows(backend, names, moves, copies, one, 1.05, wait, add)
    alone = copy.format("tensors")
    for size in _SIZES:
        tensors = [backend.full((_FLOATS,), float(i), device="cpu") for i in range(size)]
        used = {**names, "batch": _FORMS["dict"](tensors), "tensors": tensors}
        for floor, ours in (
            ("device_put of a list alone", alone),
            # Of what a copy has to know, by JAX's own means.
            (
                "device_put of a list whose devices are asked for",
                f"{{x.device for x in tensors}}, {alone}",
            ),
        ):
            name = f"copy on the CPU: dict of {size}, {floor}"
            yield Comparison(name, ours, copy.format("batch"), None, used, finish=wait)


def tensorflow_rows(backend: Any) -> Iterator[Row]:
    """Compare with a walk by hand that calls ``tf.identity``, which shares memory on a CPU."""
    import tensorflow as tf

    def move(value: Any, target: str) -> Any:
        with tf.device(target):
            return walk(value, tf.identity)

    names = {"move": move, "native": backend.native("gpu:1"), "cpu": backend.native("cpu")}
    moves, copies = {"by hand": "move(batch, native)"}, {"by hand": "move(batch, cpu)"}
    one = "move(x, native)", "move(x, cpu)"
    yield from _rows(backend, names, moves, copies, one, 1.05, backend.synchronize)


def mxnet_rows(backend: Any) -> Iterator[Row]:
    """Compare with a walk by hand."""
    native = backend.native("gpu:1")
    names = {
        "walked": walk,
        "native": native,
        "move": lambda x: x.as_in_ctx(native),
        "copy": lambda x: x.copy(),
    }
    moves, copies = {"by hand": "walked(batch, move)"}, {"by hand": "walked(batch, copy)"}
    one = "x.as_in_ctx(native)", "x.copy()"
    yield from _rows(backend, names, moves, copies, one, 1.05, backend.synchronize)


def placement_rows(backend: Any) -> Iterator[Row]:
    """Compare two ways to ask where the parameters of a torch model are."""
    import torch

    for count in (1, 10, 50):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count)))
        names = {"backend": backend, "model": model}
        theirs = "{k: v.device for k, v in model.named_parameters()}"
        yield Comparison(
            f"placement, {count} layers", "backend.placement(model)", theirs, 2.0, names
        )


def _rows(
    backend: Any,
    names: dict[str, Any],
    moves: dict[str, str],
    copies: dict[str, str],
    one: tuple[str, str],
    aim: float,
    finish: Callable[[], object],
    add: str = "{}",
) -> Iterator[Row]:
    """Compare every size and form of batch, moved and copied, and one tensor.

    Args:
        backend: ours.
        names: the names that the statements use.
        moves, copies: the way of the framework -> a statement about ``batch``.
        one: the native calls that move and copy ``x``.
        aim: for the batches.
        finish: called at the end of each sample, to wait for what was computed.
        add: keeps the result of ours for ``finish``; theirs keep theirs by themselves.
    """
    names = {**names, "backend": backend}
    for source, target in (("gpu:0", "gpu:1"), ("cpu", "gpu:1"), ("cpu", "cpu")):
        ours = "backend.copy({})" if source == target else f"backend.to({{}}, {target!r})"
        ours = add.format(ours)
        what = "copy on the CPU" if source == target else f"to, {source} to {target}"
        theirs = copies if source == target else moves
        for size in _SIZES:
            for form, make in _FORMS.items():
                tensors = [backend.full((_FLOATS,), float(i), device=source) for i in range(size)]
                used = {**names, "batch": make(tensors)}
                for whose, statement in theirs.items():
                    name = f"{what}: {form} of {size}, against {whose}"
                    yield Comparison(
                        name, ours.format("batch"), statement, aim, used, finish=finish
                    )
        x = backend.full((_FLOATS,), 1.0, device=source)
        yield Comparison(
            f"{what}: one tensor",
            ours.format("x"),
            one[source == target],
            1.05,
            {**names, "x": x},
            finish=finish,
        )


def _nothing() -> None:
    """Wait for nothing: torch's virtual GPUs have copied when the call returns."""


def nest(tensors: list[Any]) -> dict[str, dict[str, Any]]:
    """Return tensors in a dict of dicts of three."""
    return {
        f"part {i}": {f"x{j}": x for j, x in enumerate(tensors[i : i + 3])}
        for i in range(0, len(tensors), 3)
    }


_FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": lambda tensors: {f"x{i}": x for i, x in enumerate(tensors)},
    "list of tuples": lambda tensors: [
        tuple(tensors[i : i + 3]) for i in range(0, len(tensors), 3)
    ],
    "dict of dicts": nest,
}


def walk(value: Any, change: Callable[[Any], Any]) -> Any:
    """Walk a batch as one does by hand, for the containers that one has."""
    if isinstance(value, dict):
        return {key: walk(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([walk(inner, change) for inner in value])
    return change(value)
