"""The work on MXNet: of the peers, none of which knows it any more, only its own Gluon is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from against import common
from against.programs import first_tensor_work
from against.work import NATIVE, Work
from batches import walk

_GLUON = "Gluon"
_WAKING = (
    "the wait for a thread of the engine: Gluon's way is the native call and more of Python, and "
    "takes less than the native call alone"
)


def works(backend: Any, folder: Path) -> Iterator[Work]:
    """Yield each piece of work."""
    import mxnet as mx

    mx.npx.set_np()  # without it, Gluon writes no arrays of this kind
    names = {"mx": mx, "walked": walk}
    for source, target in (("cpu", "cpu"), ("gpu:0", "gpu:1"), ("cpu", "gpu:1")):
        native = backend.native(target)
        used = {**names, "move": lambda x, native=native: x.as_in_ctx(native), "native": native}
        one = {
            NATIVE: "x.as_in_ctx(native)",
            _GLUON: "mx.gluon.utils.split_and_load(x, [native])[0]",
        }
        many = {NATIVE: "walked(batch, move)"}
        ready = "{}" if source == target else "waited({})"
        one, many = (
            {peer: ready.format(way) for peer, way in ways.items()} for ways in (one, many)
        )
        used["waited"] = _wait
        more = {"names": used, "peers": {}, "ready": ready, "reasons": {_GLUON: _WAKING}}
        yield from common.moves(backend, source, target, one, many, **more)
    yield from common.look_up(backend, "gpu:0", {NATIVE: "x.ctx"}, {}, names, {})
    ones = {NATIVE: "mx.np.ones((2, 3), ctx=native)"}
    known = {NATIVE: "calls of Python that know the dtype and the device"}
    yield from common.creation(backend, "gpu:0", ones, names, {}, known)
    there = {_GLUON: "model.collect_params().reset_ctx(native)"}
    moving = {_GLUON: "twin.collect_params().reset_ctx(next(natives))"}
    yield from common.compare_placing(backend, "gpu:0", there, moving, names, {})
    ways = {
        NATIVE: (
            "mx.npx.save(str(folder / 'plain'), tensors)",
            "mx.npx.load(str(folder / 'plain'))",
        ),
    }
    model_ways = {
        _GLUON: (
            "net.save_parameters(str(folder / 'net'))",
            "net.load_parameters(str(folder / 'net'))",
        ),
    }
    total = "sum(float(x.sum()) for x in {}.values())"
    yield from common.files(backend, folder, ways, model_ways, names, {}, total=total)
    yield from first_tensor_work(
        "mxnet",
        "import numpy; numpy.bool = bool; import mxnet as mx; mx.np.ones((2, 3)).wait_to_read()",
        {},
    )


def _wait(value: Any) -> Any:
    """Return a nesting when each of its arrays is computed: MXNet has threads for that."""
    walk(value, lambda x: x.wait_to_read())
    return value
