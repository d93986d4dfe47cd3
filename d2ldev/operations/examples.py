"""The examples of a batch: how many there are, and which of its values are split.

One rule for ``Backend.split``, for the ``Trainer`` on several GPUs and in several processes, and
for every framework. A batch has n examples.

- A tensor or a NumPy array of shape ``(n, ...)`` is split, also one of text. So is a tensor with
  rows of several lengths. A tensor without an axis, and a plain value (None, a number, str, bytes),
  is the same for all shards.
- The batch itself, dicts, namedtuples, dataclasses and registered containers have *fields*. Each
  field is split by this rule.
- A list, a tuple or another sequence may have fields, too. Then an item is a tensor with n
  examples, and everything else in it fits. Otherwise its items are *examples*. A sequence of n
  examples is split like a tensor, and a sequence of another length is refused. An empty one stays
  as it is.
- A list of n tensors ``(n, ...)`` with one dtype and number of axes is ambiguous, and is refused.
  The same holds for a list of n dicts with the same fields of such tensors. A tuple of them has
  fields, unless another sequence of the batch has examples: then it is refused, too.
- If all tensors are in sequences, n is the number for which everything fits. If several numbers
  fit, lists are refused, and tuples have fields.
- ``Broadcast(value)`` is the same for all shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_not
from typing import Any

from d2ldev.contract import Framework, Tensor
from d2ldev.contract.parallel import least_examples
from d2ldev.contract.training import bounds
from d2ldev.errors import UnsupportedValueError
from d2ldev.nesting.containers import BROADCAST, DICT, LIST, TUPLE, Container
from d2ldev.nesting.kinds import TENSOR, Kind, Kinds
from d2ldev.nesting.walk import container_refusal, flatten
from d2ldev.operations import creation, moving

_FIX = "d2ldev.Broadcast(value) for a value that is the same for all shards"


class Whole:
    """A batch that is to be split; its data is on the host.

    Args:
        framework: whose tensors are in it.
        batch: a nesting.
        attempted: for a message.

    Attributes:
        length: how many examples it has.
        has_sequences: whether there are sequences of examples in it.
        has_marks: whether there may be a ``Broadcast`` in it.

    Raises:
        UnsupportedValueError: if it has not one number of examples, or something in it does not
            fit the rule.
    """

    def __init__(self, framework: Framework, batch: Any, attempted: str) -> None:
        self._framework, self._attempted, self._kinds = framework, attempted, framework.state.kinds
        # Its tensors, where nothing but tensors with the same first axis is in it.
        self._rows_alone: list[Tensor] | None = None
        self.has_marks = not self._is_of_rows(batch)
        if not self.has_marks:
            return
        # It also refuses a nesting that cannot be walked, such as a cycle.
        self._flat = moving.flatten_on_host(framework, batch, attempted)
        self._batch = self._flat.unflatten({})
        self._tensors = list(self._flat.tensors.values())
        self._shapes = {id(x): self._read_shape(x) for x in self._tensors}
        # For a sequence or a number of examples that was asked for: see ``_tensors_in``.
        self._known: dict[tuple[int, int], tuple[Any, int | None]] = {}
        fields = list(self._fields(self._batch, set(), is_top=True))
        sequences = [x for x in fields if self._is_sequence(x)]
        self.length = self._number_of_examples(fields, sequences)
        examples = [x for x in sequences if not self._has_fields(x)]
        self.has_sequences = any(map(len, examples))
        for x in sequences:
            self._check(x, is_strict=self.has_sequences or not isinstance(x, tuple))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of its tensors, in order."""
        return list(self._shapes.values())

    @property
    def last(self) -> Tensor | None:
        """The last of its tensors; None if it has none."""
        return self._tensors[-1] if self._tensors else None

    def shard(
        self, number: int, size: int, *, is_filled: bool, model: Any = None
    ) -> tuple[Any, int]:
        """Return one of ``size`` shards. The first ones may have one example more.

        Args:
            number: which one, from 0.
            size: how many there are.
            is_filled: whether a shard without examples has the first ones of the batch, as many as
                the model needs.
            model: the model that is trained on it; see ``Parallel.batch_norms``.

        Returns:
            The nesting, and how many examples it has: 0 for one that is only filled.
        """
        least = 1
        if model is not None and self.length < 2 * size:
            least = least_examples(self._framework.parallel.batch_norms(model))
        start, stop = bounds(self.length, number, size, least)
        if start == stop and is_filled:
            return self._examples(0, min(least, self.length)), 0
        return self._examples(start, stop), stop - start

    # -- how many examples there are --------------------------------------------------------------

    def _is_of_rows(self, batch: Any) -> bool:
        """Tell whether a batch is a common one, which needs no search; note its tensors."""
        tensors = _fields_alone(batch, self._kinds)
        if tensors is None:
            return False
        each = {id(x): x for x in tensors}
        shapes = {key: self._read_shape(x) for key, x in each.items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or () in lengths:
            return False
        self._batch, self._shapes = batch, shapes
        self._tensors, self._rows_alone = list(each.values()), tensors
        ((self.length,),) = lengths
        self.has_sequences = False
        return True

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        # A container may make its children anew each time they are asked for.
        known = self._shapes.get(id(x))
        return self._read_shape(x) if known is None else known

    def _read_shape(self, x: Tensor) -> tuple[int, ...]:
        # Rows may have several lengths.
        return creation.shape_of(x, self._attempted, is_known=False)

    def _has_rows(self, x: Any) -> bool:
        """Tell whether a value is split by rows.

        That is a tensor, an array of text, which no tensor is made of, or a ragged tensor.
        """
        kind = self._kinds[type(x)]
        if isinstance(kind, Kind):
            return kind is TENSOR or moving.is_text(x)
        return kind.holds == "pieces" and kind.slice_items is not None

    def _is_sequence(self, x: Any) -> bool:
        kind = self._kinds[type(x)]
        return isinstance(x, range) if isinstance(kind, Kind) else kind.holds == "items"

    def _fields(self, x: Any, entered: set[int], *, is_top: bool = False) -> Iterator[Any]:
        """Yield the fields of a batch, from nested dicts, tuples and dataclasses too.

        A field is a tensor or another value that is not a container, or a list.

        Raises:
            UnsupportedValueError: for one value that nobody splits, such as a sparse array.
        """
        kind = self._kinds[type(x)]
        if isinstance(kind, Kind) or self._has_rows(x) or (kind.holds == "items" and not is_top):
            yield x
        elif kind is not BROADCAST and id(x) not in entered:
            entered.add(id(x))
            if kind.holds == "pieces":
                name = f"the {type(x).__name__} at {self._name_of(x)}"
                problem = f"{name} consists of several tensors, without a row for each example"
                raise UnsupportedValueError(self._attempted, problem, f"a dense tensor, or {_FIX}")
            for child in kind.children(x):
                yield from self._fields(child, entered)

    def _number_of_examples(self, fields: list[Any], sequences: list[Any]) -> int:
        tensors = {
            int(shape[0]): x for x in fields if self._has_rows(x) and (shape := self._shape(x))
        }
        filled = [x for x in sequences if len(x)]
        candidates = {**dict.fromkeys(tensors)}
        if not tensors:
            inner = (x for each in filled for x in self._values_with_rows(each, set()))
            candidates = {int(s[0]): None for x in inner if (s := self._shape(x))}
            candidates |= {len(x): None for x in filled}
        if len(tensors) > 1 or not candidates:
            raise self._lengths_refusal(tensors)
        possible = [n for n in candidates if all(self._fits(x, n) for x in filled)]
        if len(possible) > 1:
            lists = [x for x in filled if not isinstance(x, tuple)]
            possible = [n for n in possible if all(self._tensors_in(x, n) for x in filled)]
            if lists or len(possible) != 1:
                raise self._choice_refusal((lists or filled)[0])
        if not possible:
            raise self._misfit_refusal(tensors, filled)
        return possible[0]

    def _values_with_rows(self, x: Any, entered: set[int]) -> Iterator[Any]:
        """Yield the values in a nesting that are split by rows, if its sequences have fields."""
        kind = self._kinds[type(x)]
        if self._has_rows(x):
            yield x
        elif not isinstance(kind, Kind) and id(x) not in entered:
            entered.add(id(x))
            for child in kind.children(x):
                yield from self._values_with_rows(child, entered)

    def _fits(self, x: Any, n: int) -> bool:
        """Tell whether a sequence has fields or examples of a batch of n examples."""
        return bool(self._tensors_in(x, n)) or self._has_items(x, n)

    def _has_items(self, x: Any, n: int) -> bool:
        """Tell whether a sequence has an item for each of n examples."""
        kind = self._kinds[type(x)]
        return len(x) == n and (isinstance(kind, Kind) or kind.slice_items is not None)

    def _tensors_in(self, x: Any, n: int) -> int | None:
        """Return how many tensors of n examples are among the fields in x; None if one misfits."""
        kind = self._kinds[type(x)]
        if self._has_rows(x):
            shape = self._shape(x)
            return None if shape and shape[0] != n else len(shape[:1])
        if isinstance(kind, Kind) or kind is BROADCAST:
            return 0
        if kind.holds == "pieces":
            return None
        key = id(x), n
        if key not in self._known:
            found: int | None = 0
            # Attributes come last. They have to fit, and say nothing about the items.
            counted = len(x) if kind.holds == "items" else None
            for number, child in enumerate(kind.children(x)):
                inner = self._tensors_in(child, n)
                if self._is_sequence(child) and not inner:
                    inner = 0 if not len(child) or self._has_items(child, n) else None
                if inner is None:
                    found = None
                    break
                if counted is None or number < counted:
                    found = (found or 0) + inner
            self._known[key] = x, found  # with x, so that its id stays its own
        return self._known[key][1]

    def _has_fields(self, x: Any) -> bool:
        return bool(self._tensors_in(x, self.length))

    def _check(self, x: Any, *, is_strict: bool) -> None:
        """Refuse sequences that may have fields or examples, in a sequence of fields."""
        if not self._has_fields(x):
            return
        if is_strict and self.length == len(x) > 1 and len({*map(self._form, x)}) == 1:
            raise self._choice_refusal(x)
        for child in self._fields(x, set(), is_top=True):
            if self._is_sequence(child):
                self._check(child, is_strict=self.has_sequences or not isinstance(child, tuple))

    def _form(self, x: Any) -> tuple[object, ...]:
        """Return the properties that all examples of a batch share, without the sizes of axes."""
        kind = self._kinds[type(x)]
        if kind is TENSOR:
            return self._framework.tensors.dtype_of(x), len(self._shape(x))
        if isinstance(kind, Kind):
            return (type(x),)
        if kind.holds == "items":  # two captions need not have one length
            return type(x), *sorted({*map(self._form, kind.children(x))}, key=repr)
        return type(x), *kind.labels(x), *map(self._form, kind.children(x))

    # -- shards ------------------------------------------------------------------------------------

    def _examples(self, start: int, stop: int) -> Any:
        """Return the examples of the batch from ``start`` up to ``stop``."""
        if self._rows_alone is None:
            return self._cut(self._batch, start, stop, {}, is_top=True)
        rows = {id(x): self._rows(x, start, stop) for x in self._tensors}
        return _with_rows(self._batch, rows)

    def _cut(
        self, x: Any, start: int, stop: int, made: dict[int, tuple[Any, Any]], *, is_top: bool
    ) -> Any:
        """Return the examples of a nesting from ``start`` up to ``stop``.

        Args:
            x: the nesting, or a field in it.
            start, stop: from 0 to the number of examples.
            made: the cut values by the ids of their originals, so that one object stays one.
            is_top: whether it is the batch itself.
        """
        kind = self._kinds[type(x)]
        if self._has_rows(x):
            if not self._shape(x):
                return x
        elif isinstance(kind, Kind):
            return x[start:stop] if isinstance(x, range) else x
        elif kind is BROADCAST:
            return x
        if id(x) not in made:
            made[id(x)] = x, self._cut_anew(x, kind, start, stop, made, is_top)
        return made[id(x)][1]

    def _cut_anew(
        self,
        x: Any,
        kind: Kind | Container,
        start: int,
        stop: int,
        made: dict[int, tuple[Any, Any]],
        is_top: bool,
    ) -> Any:
        if isinstance(kind, Kind) or self._has_rows(x):
            return self._rows(x, start, stop)
        try:
            if kind.slice_items is not None and not is_top and not self._has_fields(x):
                return kind.slice_items(x, start, stop) if len(x) else x
            old = list(kind.children(x))
            new = [self._cut(child, start, stop, made, is_top=False) for child in old]
            return kind.rebuild(x, new) if any(map(is_not, new, old)) else x
        except UnsupportedValueError:
            raise
        except Exception as error:  # whatever a class's own methods raise
            raise container_refusal(
                x, "made again", self._flat.name_of(x), self._attempted, error
            ) from error

    def _rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        framework, kind = self._framework, self._kinds[type(x)]
        if isinstance(kind, Kind) and kind is not TENSOR:
            return x[start:stop]
        try:
            if isinstance(kind, Kind):
                return framework.parallel.rows(x, start, stop)
            assert kind.slice_items is not None
            return kind.slice_items(x, start, stop)
        except Exception as error:  # a sparse tensor, which has no views, or memory that ran out
            first = next(iter(flatten(x, self._kinds, self._attempted).tensors.values()))
            native = framework.devices.native(framework.tensors.device_of(first))
            fix = "a batch of dense tensors"
            raise creation.refusal(framework, error, self._attempted, native, fix) from error

    # -- errors -----------------------------------------------------------------------------------

    def _name_of(self, x: Any) -> str:
        return self._flat.name_of(x) or "the top"

    def _describe(self, x: Any) -> str:
        return f"{self._name_of(x)} is a {type(x).__name__} of {len(x)}"

    def _lengths_refusal(self, tensors: dict[int, Tensor]) -> UnsupportedValueError:
        lengths = [f"{self._flat.name_of(x) or 'the batch'} has {n}" for n, x in tensors.items()]
        return UnsupportedValueError(
            self._attempted,
            "its tensors have different numbers of examples (the first axis): " + ", ".join(lengths)
            if lengths
            else "none of its tensors has a first axis, which counts the examples",
            f"a batch whose tensors have the shapes (n, ...), with one n; {_FIX}",
        )

    def _misfit_refusal(
        self, tensors: dict[int, Tensor], sequences: list[Any]
    ) -> UnsupportedValueError:
        if not tensors:
            problem = " and ".join(map(self._describe, sequences))
            problem += ", and no number of examples fits all of them"
        else:
            (n,) = tensors
            wrong = next(x for x in sequences if not self._fits(x, n))
            problem = f"{self._describe(wrong)}, and the batch has {n} examples"
            if len(wrong) == n:
                problem += ": it has no order"
        return UnsupportedValueError(
            self._attempted, problem, f"a list with one item for each example; {_FIX}"
        )

    def _choice_refusal(self, x: Any) -> UnsupportedValueError:
        return UnsupportedValueError(
            self._attempted,
            f"{self._describe(x)}, which may be {len(x)} examples, or {len(x)} fields with the "
            "examples of the batch in each",
            "one tensor of the examples, such as a stack of images; or a dict of the fields",
        )


def _fields_alone(batch: Any, kinds: Kinds) -> list[Tensor] | None:
    """Return the tensors of a batch whose fields are tensors, and tuples and dicts of tensors.

    With a tensor beside them, a tuple of tensors with as many examples has fields.

    Returns:
        The tensors in order, one that is in two places twice. None for any other batch.
    """
    kind = kinds[type(batch)]
    if kind is not DICT and kind is not TUPLE and kind is not LIST:
        return None
    found: list[Tensor] = []
    entered: set[int] = set()
    has_tensor = False
    for x in batch.values() if kind is DICT else batch:
        kind = kinds[type(x)]
        if kind is TENSOR:
            has_tensor = True
            found.append(x)
            continue
        # The general rule rebuilds a container in two places once.
        if (kind is not DICT and kind is not TUPLE) or not x or id(x) in entered:
            return None
        entered.add(id(x))
        inner = list(x.values() if kind is DICT else x)
        if any(kinds[type(y)] is not TENSOR for y in inner):
            return None
        found += inner
    return found if has_tensor else None


def _with_rows(batch: Any, rows: dict[int, Tensor]) -> Any:
    """Return a batch that ``_fields_alone`` has read, with other tensors by the ids of its own.

    It takes half of the time of the general rule.
    """
    if type(batch) is dict:
        return {
            key: rows[id(x)] if id(x) in rows else _with_rows(x, rows) for key, x in batch.items()
        }
    made = [rows[id(x)] if id(x) in rows else _with_rows(x, rows) for x in batch]
    return made if type(batch) is list else tuple(made)


def number_of_examples(framework: Framework, batch: Any) -> int | None:
    """Return how many examples a batch has; None if they cannot be counted by the rule."""
    try:
        return Whole(framework, batch, "count the examples of a batch").length
    except UnsupportedValueError:
        return None
