"""``load_into``: match a file with an object, read the file, then put its values in place.

Four steps, in this order, so that an error leaves everything as it was:

1. the object is taken apart: ``contents.py``;
2. each tensor is paired with one of the file, of the same name, shape and dtype: ``match.py``;
3. all of them are read, each to the device of the one that it replaces;
4. they are put in place, which cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from d2ldev.contract import Framework
from d2ldev.device import CPU
from d2ldev.errors import CheckpointError, D2LDevError, UnsupportedValueError, describe, quote
from d2ldev.files.contents import Contents
from d2ldev.files.differences import COMPARED, Differences, Source, find_nearest
from d2ldev.files.format.container import FileError, as_bytes
from d2ldev.files.load import Checkpoint, Wanted, open_checkpoint, shorten
from d2ldev.files.match import Key, Match, Pair, StoredContents, list_below
from d2ldev.files.structure import MODEL, Outline, flatten
from d2ldev.files.tensors_by_name import TensorsByName
from d2ldev.nesting.walk import depth_refusal, join_path
from d2ldev.operations.arguments import as_path, flag


class Loaded(NamedTuple):
    """What ``load_into(..., strict=False)`` has done, with names as ``named_tensors`` gives them.

    Args:
        value: the object to use from then on.
        matched: the names that were read.
        missing: the names that the file lacks, first names without a shape. Their values stay.
        unexpected: what only the file has.

    >>> w, v = backend.ones(2), backend.zeros(2)
    >>> loaded = backend.load_into({'w': w}, {'v': v}, strict=False)
    >>> loaded.matched, loaded.missing, loaded.unexpected
    ([], ['w'], ['v'])
    """

    value: Any
    matched: list[str]
    missing: list[str]
    unexpected: list[str]


def load_into(
    framework: Framework, obj: Any, source: Any, *, strict: bool = True, only: str = ""
) -> Any:
    """Read a file, or a mapping, into a nesting; see ``Backend.load_into``."""
    strict = flag("load parameters", "strict", strict)
    if isinstance(source, Mapping):
        given = TensorsByName(framework, source, f"load a mapping into {type(obj).__name__}")
        return _load(framework, obj, given, only, is_strict=strict)
    path = as_path(source, "load_into")
    attempted = f"load {path} into {type(obj).__name__}"
    with open_checkpoint(framework, path, attempted) as checkpoint:
        return _load(framework, obj, checkpoint, only, is_strict=strict)


def _load(framework: Framework, obj: Any, source: Source, only: str, *, is_strict: bool) -> Any:
    if not isinstance(only, str):
        problem = f"only={describe(only)} is not a name"
        raise UnsupportedValueError(source.attempted, problem, "only='components.model'")
    found = _under(source.outline, only) if only else source.outline
    if only and found is None:
        few = islice(flatten(source.outline), COMPARED)
        names = {each for name in few for each in _beginnings(name[:300])}
        nearest = find_nearest(only.rstrip("."), sorted(names))
        raise CheckpointError(
            source.attempted,
            f"it has nothing under {only!r}",
            f"only={nearest or 'the name of a value in the file'!r}",
        )
    put, told = prepare(framework, source, obj, found, is_strict=is_strict)
    value = put()
    return value if is_strict else Loaded(value, told.matched, told.missing, told.unexpected)


def _under(node: Any, name: str) -> Any:
    """Return the node of a file under a dotted name; None if there is none."""
    if not isinstance(node, Outline):
        return None
    children = {str(label): child for label, child in node.children().items()}
    if name in children:
        return children[name]
    for text, child in children.items():
        if name.startswith(f"{text}."):
            found = _under(child, name.removeprefix(f"{text}."))
            if found is not None:
                return found
    # The names of a model, or of another program's file.
    inner = list_below(name, children)
    if not inner:
        return None
    return Outline(
        *(MODEL, list(inner), list(inner.values())),
        optional=frozenset(list_below(name, dict.fromkeys(node.optional))),
        settings=list_below(name, node.settings),
    )


def _beginnings(name: str) -> Iterator[str]:
    """Yield the names of the nodes that a tensor of this name is in."""
    while name := name.rpartition(".")[0]:
        yield name


def prepare(
    framework: Framework, source: Source, obj: Any, found: Any, *, is_strict: bool = True
) -> tuple[Callable[[], Any], Differences]:
    """Match a nesting with a node of the file, and read that; nothing is changed yet.

    Args:
        framework: whose nesting it is.
        source: the file, or a mapping.
        obj: an object like the one that was saved.
        found: the node: ``source.outline`` or a child of it.
        is_strict: whether each name has to be on both sides.

    Returns:
        A function that puts the values in place, and returns the object to use from then on. It
        cannot fail. And the names on both sides.

    Raises:
        CheckpointError: if it does not fit.
        FileError: if the file is damaged.
    """
    told = Differences(source)
    try:
        with ExitStack() as undo:
            is_by_name = source.writer is None
            here = Contents(framework, obj, source.attempted, is_by_name=is_by_name)
            there = StoredContents(found, here.takes_state)
            left_alone = _complete(here, there, told, undo, is_strict=is_strict)
            here.list_tensors()
            match = Match(here, there, told, left_alone, is_strict=is_strict)
            told.check(framework, is_strict=is_strict)
            tensors = source.read([_plan_load(framework, x) for x in match.pairs.values()])
            news = dict(zip(match.pairs, tensors, strict=True))
            told.different += _find_torn_ties(framework, source, match, news)
            puts = [_prepare_state(framework, source, match, told, *x) for x in match.states]
            told.check(framework, is_strict=is_strict)
            put = _prepare_put(framework, here, match, news, puts)
            undo.pop_all()
            return put, told
    except RecursionError:
        raise depth_refusal(source.attempted) from None


def _complete(
    here: Contents, there: StoredContents, told: Differences, undo: ExitStack, *, is_strict: bool
) -> set[str]:
    """Make tensors that models lack, and return the names that are left alone on both sides."""
    left_alone: set[str] = set()
    for path in here.models:
        theirs = list_below(path, there.values)
        try:
            lacking, others = here.complete(path, theirs, undo.callback, is_strict=is_strict)
        except D2LDevError:
            raise
        except Exception as error:  # whatever the file's shapes and arguments make it raise
            told.different.append(f"{path or 'the top'}: {shorten(error)}")
            continue
        told.missing += [join_path(path, name) for name in lacking]
        left_alone |= {join_path(path, name) for name in others}
    return left_alone


def _plan_load(framework: Framework, pair: Pair) -> Wanted:
    x = pair.entry.value
    if isinstance(x, np.ndarray):
        return Wanted(pair.stored._replace(kind="array"), CPU)
    stored = pair.stored._replace(kind="tensor")
    device = framework.tensors.device_of(x)
    if pair.layouts is None:
        return Wanted(stored, device)
    theirs, mine = pair.layouts
    shape = tuple(int(size) for size in x.shape)

    def convert(array: Any) -> Any:
        try:
            return np.ascontiguousarray(mine.native(theirs.canonical(array), shape))
        except (ValueError, OverflowError) as error:
            raise FileError(f"a layout of its tensor {quote(stored.name)} is damaged") from error

    return Wanted(stored, device, convert)


def _find_torn_ties(
    framework: Framework, source: Source, match: Match, news: Mapping[Key, Any]
) -> Iterator[str]:
    """Yield in words each tensor that is one here, and in the file two that differ."""

    def bits(x: Any) -> Any:
        return as_bytes(x if isinstance(x, np.ndarray) else framework.files.borrow(x))

    for first, second in match.ties:
        if not np.array_equal(bits(news[first]), bits(news[second])):
            names = f"{first[1]} and {second[1]}"
            yield f"{names} are one tensor here, and {source.called} has two values"


def _prepare_state(
    framework: Framework,
    source: Source,
    match: Match,
    told: Differences,
    optimizer: Any,
    found: Outline,
) -> Any:
    # On the CPU, because the optimizer decides which part of its state belongs where.
    assert isinstance(source, Checkpoint)  # a mapping has no states
    state = source.read_node(found)
    try:
        order = match.find_order(framework.files.list_parameters(optimizer), found.parameters)
        more = () if order is None else (order,)
        return framework.files.prepare_state(optimizer, state, *more)
    except D2LDevError:
        raise
    except Exception as error:  # whatever another kind of state makes the backend raise
        name = type(optimizer).__name__
        told.different.append(f"the state does not fit this {name}: {shorten(error)}")
        return None


def _prepare_put(
    framework: Framework,
    here: Contents,
    match: Match,
    news: Mapping[Key, Any],
    put_states: Sequence[Callable[[], object]],
) -> Callable[[], Any]:
    """Make the containers; return a function that cannot fail, see ``prepare``.

    Args:
        framework: whose tensors they are.
        here: the object.
        match: where the values go.
        news: the read values by the keys of ``match.pairs``.
        put_states: functions that put the states of optimizers in place.
    """
    fills = dict(_plan_fills(framework, match, news))
    replaced = {place: news[key] for place, key in match.places.items() if key not in fills}
    placed, puts = here.replace({**match.values, **replaced})
    objects = [x for inventory in here.inventories.values() for x in inventory.objects]

    def put() -> Any:
        for put_one in (*fills.values(), *puts, *put_states):
            put_one()
        for loaded in objects:
            framework.models.finish(loaded)
        return placed

    return put


def _plan_fills(
    framework: Framework, match: Match, news: Mapping[Key, Any]
) -> Iterator[tuple[Key, Callable[[], object]]]:
    """Yield functions that put values into tensors, which stay."""
    models = framework.models
    values = {
        key: (x.value, news[key], key[0] in match.listed or x.is_refilled)
        for key, (x, *_) in match.pairs.items()
        if x.is_native
    }
    plans = models.plan_writes([*values.values()])
    for (key, (x, new, _)), plan in zip(values.items(), plans, strict=True):
        if plan is not None:
            yield key, plan
        elif refill := models.find_refill(x):
            yield key, partial(refill, new)
