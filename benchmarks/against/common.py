"""The work that is the same on every framework, and the names that its statements use."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from against.work import AIM_OF_NOTHING, LONG_CALLS, Work
from batches import nest

SIZES = (3, 30, 300)
LAYERS = (5, 50, 500)
"""Of a model: each has a kernel and a bias, so that there are 10, 100 and 1000 parameters."""

_FLOATS = 4
_TENSORS = 20

_LOOK_UP = (
    "a call through Python's own dispatch, around an attribute that the framework reads in C: "
    "device_of returns a Device of d2ldev's, which is the same on every framework"
)


SAFETENSORS = (
    "save_file(dict(tensors), folder / 'theirs.safetensors')",
    "load_file(folder / 'theirs.safetensors')",
)
"""What saves and loads ``tensors`` with the library of that name."""


def tensor_names(backend: Any, device: str, **more: Any) -> dict[str, Any]:
    """Return the names of one tensor on a device, and of the device."""
    import d2ldev

    return {
        "backend": d2ldev.backend,
        "backend_of": d2ldev.backend_of,
        "device": backend.device(device),
        "native": backend.native(device),
        "x": backend.full((_FLOATS,), 1.0, device=device),
        **more,
    }


def moves(
    backend: Any,
    source: str,
    target: str,
    one: Mapping[str, str],
    many: Mapping[str, str],
    *,
    names: Mapping[str, Any],
    peers: Mapping[str, Callable[[], Mapping[str, Any]]],
    ready: str = "{}",
    reasons: Mapping[str, str] | None = None,
) -> Iterator[Work]:
    """Compare a move of one tensor and of nestings of 3, 30 and 300.

    Args:
        backend: ours.
        source, target: the devices; if they are the same, the move is none.
        one, many: the name of a peer -> its statement about ``x``, and about ``batch``.
        names: what the statements use; ``peers`` what those of the peers use besides.
        peers: the name of a peer -> what returns its names.
        ready: waits for what really moves.
        reasons: why ours takes longer than what is named, where it does.
    """
    is_none = source == target
    what = f"to, there already ({source})" if is_none else f"to, {source} to {target}"
    aim = {"aim": AIM_OF_NOTHING} if is_none else {}
    ready = "{}" if is_none else ready
    common = {**tensor_names(backend, target), **names}
    for size in (1, *SIZES):
        tensors = [backend.full((_FLOATS,), float(i), device=source) for i in range(size)]
        theirs, argument = (one, "x") if size == 1 else (many, "batch")
        value = tensors[0] if size == 1 else nest(tensors)
        described = "one tensor" if size == 1 else f"a dict of dicts of {size}"
        yield Work(
            f"{what}: {described}",
            ready.format(f"backend.to({argument}, device)"),
            theirs,
            names={**common, argument: value},
            peers=peers,
            reasons=reasons or {},
            **aim,
        )


def look_up(
    backend: Any,
    device: str,
    devices: Mapping[str, str],
    frameworks: Mapping[str, str],
    names: Mapping[str, Any],
    peers: Mapping[str, Callable[[], Mapping[str, Any]]],
) -> Iterator[Work]:
    """Compare asking for the device of a tensor, and for the framework that it is of."""
    used = {**tensor_names(backend, device), **names}
    for name, ours, theirs in (
        ("device_of", "backend.device_of(x)", devices),
        ("the framework of a tensor", "backend_of(x)", frameworks),
    ):
        reasons = dict.fromkeys(theirs, _LOOK_UP)
        if theirs:
            yield Work(name, ours, theirs, AIM_OF_NOTHING, used, peers, reasons)


def creation(
    backend: Any,
    device: str,
    ones: Mapping[str, str],
    names: Mapping[str, Any],
    peers: Mapping[str, Callable[[], Mapping[str, Any]]],
    reasons: Mapping[str, str] | None = None,
) -> Iterator[Work]:
    """Compare making a tensor on a device."""
    used = {**tensor_names(backend, device), **names}
    ours = "backend.ones((2, 3), device=device)"
    yield Work(f"ones, on {device}", ours, ones, names=used, peers=peers, reasons=reasons or {})


def compare_placing(
    backend: Any,
    device: str,
    there: Mapping[str, str],
    moving: Mapping[str, str],
    names: Mapping[str, Any],
    peers: Mapping[str, Callable[[], Mapping[str, Any]]],
    reasons: Mapping[str, str] | None = None,
) -> Iterator[Work]:
    """Compare placing a model where it is, and on two devices in turn.

    Args:
        backend: ours.
        device: where the model is that does not move.
        there, moving: the name of a peer -> its statement about ``model`` and ``native``, and about
            ``twin`` and ``natives``.
        names, peers, reasons: as in ``moves``.
    """
    devices = [backend.gpu(0), backend.gpu(1)]
    for layers in LAYERS:
        sizes = [8] * (layers + 1)
        used = {
            **tensor_names(backend, device),
            **names,
            "model": backend.mlp(sizes, device=device),
        }
        rounds = LONG_CALLS if layers > LAYERS[0] else 51
        what = f"{2 * layers} parameters"
        more = {"peers": peers, "reasons": reasons or {}, "rounds": rounds}
        ours = "backend.place(model, device)"
        none = AIM_OF_NOTHING
        yield Work(f"place, there already: {what}", ours, there, none, names=used, **more)
        used |= {
            "model": backend.mlp(sizes, device=devices[0]),
            "twin": backend.mlp(sizes, device=devices[0]),
            "devices": itertools.cycle(reversed(devices)),
            "natives": itertools.cycle([backend.native(x) for x in reversed(devices)]),
        }
        ours = "backend.place(model, next(devices))"
        yield Work(f"place, gpu:0 and gpu:1 in turn: {what}", ours, moving, names=used, **more)


def files(
    backend: Any,
    folder: Path,
    ways: Mapping[str, tuple[str, str]],
    model_ways: Mapping[str, tuple[str, str]],
    names: Mapping[str, Any],
    peers: Mapping[str, Callable[[], Mapping[str, Any]]],
    *,
    total: str,
) -> Iterator[Work]:
    """Compare saving and loading, of a dict of tensors and of a model.

    Args:
        backend: ours.
        folder: where the files are written.
        ways: the name of a peer -> statements that save ``tensors``, and return them from the file
            that they have saved.
        model_ways: the name of a peer -> statements that save ``net``, and load into it.
        names, peers: as in ``moves``.
        total: the statement that reads all of what ``{}`` has loaded: some map the file into memory
            and read nothing until then.
    """
    import numpy as np

    draw = np.random.default_rng(0)
    arrays = [draw.random((250, 1000), np.float32) for _ in range(_TENSORS)]
    used = {
        **tensor_names(backend, "cpu"),
        **names,
        "folder": folder,
        "mine": folder / "mine.safetensors",
        "tensors": {f"w{i}": backend.asarray(array) for i, array in enumerate(arrays)},
        "net": backend.mlp([1000] * 6),
    }
    syncs = dict.fromkeys(
        {**ways, **model_ways},
        "d2ldev waits until the disk has the file before the old one is replaced, and writes "
        "checksums; the others leave the file to the operating system's cache",
    )
    checks = dict.fromkeys({**ways, **model_ways}, "d2ldev reads everything and checks each tensor")
    more = {"peers": peers, "rounds": LONG_CALLS, "finish": backend.synchronize}
    for name, ours, which, reasons in (
        (f"save {_TENSORS} tensors of 1 MB", "backend.save(tensors, mine)", 0, syncs),
        (f"load {_TENSORS} tensors of 1 MB, and read them", "backend.load(mine)", 1, checks),
    ):
        reading = "{}" if which == 0 else total
        theirs = {peer: reading.format(way[which]) for peer, way in ways.items()}
        statement = reading.format(ours)
        yield Work(name, statement, theirs, names=used, reasons=reasons, **more)
    for name, ours, which, reasons in (
        ("save a model of 20 MB", "backend.save(net, mine)", 0, syncs),
        ("load into a model of 20 MB", "backend.load_into(net, mine)", 1, checks),
    ):
        theirs = {peer: way[which] for peer, way in model_ways.items()}
        yield Work(name, ours, theirs, names=used, reasons=reasons, **more)


# -- the names of peers that are the same on several frameworks ------------------------------------


def array_api_names() -> dict[str, Any]:
    """Return what array-api-compat has."""
    from array_api_compat import array_namespace, device, to_device

    return {"array_namespace": array_namespace, "device_of": device, "to_device": to_device}


def keras_names() -> dict[str, Any]:
    """Return Keras, which has read by now on which framework it is to run."""
    import keras

    return {"keras": keras}


def einops_names() -> dict[str, Any]:
    """Return what of einops finds a tensor's framework."""
    from einops._backends import get_backend

    return {"get_backend": get_backend}


def safetensors_names(framework: str, *more: str) -> dict[str, Any]:
    """Return what safetensors has for a framework, as it names it: two functions, and more."""
    module = importlib.import_module(f"safetensors.{framework}")
    return {name: getattr(module, name) for name in ("load_file", "save_file", *more)}
