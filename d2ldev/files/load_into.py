"""``load_into``: match a file with an object, read the file, then put its values in place.

Three steps, in this order, so that an error leaves everything as it was:

1. each tensor is paired with one of the file, of the same name, shape and dtype: ``match.py``;
2. all of them are read, each to the device of the one that it replaces;
3. they are put in place, which cannot fail.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from d2ldev.contract import Framework
from d2ldev.device import CPU
from d2ldev.errors import (
    CheckpointError,
    D2LDevError,
    UnsupportedValueError,
    describe,
    quote,
    text_of,
)
from d2ldev.files.format.container import FileError, as_bytes
from d2ldev.files.load import Checkpoint, Wanted, open_checkpoint, shorten
from d2ldev.files.match import Match, Pair, Path, Place, list_below
from d2ldev.files.structure import MODEL, Outline, flatten
from d2ldev.files.tensors_by_name import TensorsByName
from d2ldev.nesting.containers import Container
from d2ldev.nesting.kinds import Kind
from d2ldev.nesting.walk import container_refusal, depth_refusal, join_path, label_children
from d2ldev.operations.arguments import as_path, flag

# A file may have millions of long names. An error shows this many of them. It looks for the nearest
# name among this many, by this many of their last characters.
_SHOWN = 10
_COMPARED = 500
_TAIL = 60

Source = Checkpoint | TensorsByName


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
        few = islice(flatten(source.outline), _COMPARED)
        names = {each for name in few for each in _beginnings(name[: 5 * _TAIL])}
        nearest = _nearest(only.rstrip("."), sorted(names))
        raise CheckpointError(
            source.attempted,
            f"it has nothing under {only!r}",
            f"only={nearest or 'the name of a value in the file'!r}",
        )
    put, match = prepare(framework, source, obj, found, is_strict=is_strict)
    value = put()
    return value if is_strict else Loaded(value, match.matched, match.missing, match.unexpected)


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


def _nearest(name: str, names: Sequence[str]) -> str:
    """Return the most similar name; empty if none is similar."""
    tails = {other[-_TAIL:]: other for other in names[:_COMPARED]}
    return "".join(tails[tail] for tail in difflib.get_close_matches(name[-_TAIL:], tails, 1))


def prepare(
    framework: Framework, source: Source, obj: Any, found: Any, *, is_strict: bool = True
) -> tuple[Callable[[], Any], Match]:
    """Match a nesting with a node of the file, and read that; nothing is changed yet.

    Args:
        framework: whose nesting it is.
        source: the file, or a mapping.
        obj: an object like the one that was saved.
        found: the node: ``source.outline`` or a child of it.
        is_strict: whether each name has to be on both sides.

    Returns:
        A function that puts the values in place, and returns the object to use from then on. It
        cannot fail. And the ``Loaded`` that it puts in place.

    Raises:
        CheckpointError: if it does not fit.
        FileError: if the file is damaged.
    """
    try:
        with ExitStack() as undo:
            match = Match(
                framework,
                obj,
                found,
                source.attempted,
                source.called,
                is_strict=is_strict,
                is_by_name=source.writer is None,
                undo=undo.callback,
            )
            _check(framework, source, match, is_strict=is_strict)
            pairs = match.pairs.values()
            tensors = source.read([_plan_load(framework, pair) for pair in pairs])
            news = dict(zip(match.pairs, tensors, strict=True))
            _check_ties(framework, source, match, news)
            puts = [_prepare_state(framework, source, match, *state) for state in match.states]
            _check(framework, source, match, is_strict=is_strict)
            put = _Putting(framework, source.attempted, match, news).prepare(obj, puts)
            undo.pop_all()
            return put, match
    except RecursionError:
        raise depth_refusal(source.attempted) from None


def _check(framework: Framework, source: Source, match: Match, *, is_strict: bool) -> None:
    """Raise one error that names everything that does not fit, if anything does not."""
    told = []
    if match.missing and is_strict:
        told.append(f"it lacks {_some(match.missing)}")
    if match.unexpected and is_strict:
        told.append(f"it has unexpected {_some(match.unexpected)}")
        nearest = [(name, _nearest(name, match.unexpected)) for name in match.missing[:_SHOWN]]
        told += [f"{shorten(name)} may be {shorten(other)}" for name, other in nearest if other]
    if match.different:
        told.append(f"these do not fit: {_some(match.different, '; ')}")
    if not told:
        return
    is_ours = source.writer in (None, framework.name)
    by = "" if is_ours else f", which the {shorten(source.writer)} backend wrote"
    fix = f"{source.look}{by}"
    if fitting := _find_fitting_node(match.missing, match.unexpected):
        fix = f"backend.load_into(..., only={quote(fitting)}), or {fix}"
    elif fitting := _find_fitting_node(match.unexpected, match.missing):
        fix = f"load it into the value at {quote(fitting)} of the object alone, or {fix}"
    # Such as a module whose parameters are kept apart from it.
    elif match.unexpected and not (match.pairs or match.missing or match.different):
        told.append("the object holds no tensors")
        fix = (
            "give what was saved, or what holds its tensors: "
            f"params = backend.load_into(params, ...); {fix}"
        )
    raise CheckpointError(source.attempted, f"{'; '.join(told)}; nothing was changed", fix)


def _find_fitting_node(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the name of the only node in ``others`` that has these names; empty if none has."""
    if not names or len(names) > len(others):
        return ""
    nodes = [
        other.removesuffix(f".{names[0]}") for other in others if other.endswith(f".{names[0]}")
    ]
    wanted = set(names)
    # A file may have millions of names, and each node is compared with all of them.
    fitting = [
        node
        for node in nodes[:_SHOWN]
        if wanted == {each[len(node) + 1 :] for each in others if each.startswith(f"{node}.")}
    ]
    return fitting[0] if len(fitting) == 1 else ""


def _some(names: Sequence[str], separator: str = ", ") -> str:
    text = separator.join(map(shorten, names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{text} and {more} more" if more > 0 else text


def _plan_load(framework: Framework, pair: Pair) -> Wanted:
    if isinstance(pair.value, np.ndarray):
        return Wanted(pair.stored._replace(kind="array"), CPU)
    stored = pair.stored._replace(kind="tensor")
    device = framework.tensors.device_of(pair.value)
    if pair.layouts is None:
        return Wanted(stored, device)
    theirs, mine = pair.layouts
    shape = tuple(int(size) for size in pair.value.shape)

    def convert(array: Any) -> Any:
        try:
            return np.ascontiguousarray(mine.native(theirs.canonical(array), shape))
        except (ValueError, OverflowError) as error:
            raise FileError(f"a layout of its tensor {quote(stored.name)} is damaged") from error

    return Wanted(stored, device, convert)


def _check_ties(
    framework: Framework, source: Source, match: Match, news: Mapping[tuple[int, str], Any]
) -> None:
    """Note each tensor that is one here, and in the file two that differ."""

    def bits(x: Any) -> Any:
        return as_bytes(x if isinstance(x, np.ndarray) else framework.files.borrow(x))

    for first, second in match.ties:
        if not np.array_equal(bits(news[first]), bits(news[second])):
            names = f"{first[1]} and {second[1]}"
            match.different.append(
                f"{names} are one tensor here, and {source.called} has two values"
            )


def _prepare_state(
    framework: Framework, source: Source, match: Match, optimizer: Any, found: Outline
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
        match.different.append(f"the state does not fit this {name}: {shorten(error)}")
        return None


class _Putting:
    """Put the read values in place.

    Args:
        framework: whose tensors they are.
        attempted: the current operation, for messages.
        match: where they go.
        news: the read values by the keys of ``match.pairs``.
    """

    def __init__(
        self, framework: Framework, attempted: str, match: Match, news: dict[tuple[int, str], Any]
    ) -> None:
        self._framework, self._attempted, self._match = framework, attempted, match
        self._news: dict[Place, Any] = dict(match.values)
        # Functions that put values into tensors, which stay.
        self._fills = dict(self._plan_fills(news))
        for place, key in match.places.items():
            if key not in self._fills:
                self._news[place] = news[key]
        self._models = {id(model.top): path for path, model in match.models.items()}
        # id of a container and of its new children -> the new container.
        self._made: dict[tuple[int, ...], Any] = {}

    def _plan_fills(
        self, news: Mapping[tuple[int, str], Any]
    ) -> Iterator[tuple[tuple[int, str], Callable[[], object]]]:
        match, models = self._match, self._framework.models
        values = {
            key: (x, news[key], id(x) in match.listed or match.is_refilled(x))
            for key, (x, *_) in match.pairs.items()
            if not isinstance(x, np.ndarray)
        }
        plans = models.plan_writes([*values.values()])
        for (key, (x, new, _)), plan in zip(values.items(), plans, strict=True):
            if plan is not None:
                yield key, plan
            elif refill := models.find_refill(x):
                yield key, partial(refill, new)

    def prepare(self, obj: Any, puts: Sequence[Callable[[], object]]) -> Callable[[], Any]:
        """Make the containers; return a function that cannot fail, see ``prepare`` above."""
        models = self._framework.models
        slots = [
            (slot, self._remake(slot.value, join_path(path, name)))
            for path, model in self._match.models.items()
            for name, slot in model.slots
        ]
        placed = self._remake(obj, ())
        objects = [obj for model in self._match.models.values() for obj in model.objects]

        def put() -> Any:
            for fill in self._fills.values():
                fill()
            for slot, new in slots:
                if slot.put is not None and new is not slot.value:
                    slot.put(new)
            for put_state in puts:
                put_state()
            for loaded in objects:
                models.finish(loaded)
            return placed

        return put

    def _remake(self, x: Any, path: Path) -> Any:
        """Return a nesting with the read values; other values stay.

        Args:
            x: the nesting.
            path: see ``Place``.
        """
        kind = self._framework.state.kinds[type(x)]
        if isinstance(kind, Kind):
            return self._news.get(Place(path, id(x)), x)
        path = self._models.get(id(x), path)
        if isinstance(path, str):
            old = label_children(x, kind, path, self._attempted)
            new = [self._remake(child, join_path(path, label)) for label, child in old]
        else:
            kind = kind.in_files
            old = label_children(x, kind, ".".join(map(text_of, path)), self._attempted)
            new = [self._remake(child, (*path, label)) for label, child in old]
        if all(map(is_, new, (child for _, child in old))):
            return x
        # A container that is shared stays shared.
        key = (id(x), *map(id, new))
        if key not in self._made:
            self._made[key] = self._rebuild(x, kind, new, path)
        return self._made[key]

    def _rebuild(self, x: Any, kind: Container, new: list[Any], path: Path) -> Any:
        try:
            return kind.rebuild(x, new)
        except Exception as error:  # whatever a class's own methods raise
            name = path if isinstance(path, str) else ".".join(map(text_of, path))
            raise container_refusal(x, "made again", name, self._attempted, error) from error
