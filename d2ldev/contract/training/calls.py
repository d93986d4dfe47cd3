"""Calls of a model with a batch: which entries are its inputs, and which one is the target.

One rule for ``fit``, ``validate``, ``predict`` and ``learner``. A tuple is given by position. A
mapping is given by name, and the order of its keys never matters:

- ``'sample_weight'`` are weights, unless the model has an input of this name.
- ``'y'`` is the target. Without it, the target is the one key that does not name an input. If
  nothing compares with a target, every key is an input.
- A key that names an input goes there. If no key does, a single key goes to the one input that a
  model needs.
- Any other key is an error. But beside ``'y'``, ``**kwargs`` of a model takes it, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from d2ldev.contract.training.batches import Weighted
from d2ldev.errors import UnsupportedValueError, describe, warn
from d2ldev.nesting.kinds import UNKNOWN, Kinds
from d2ldev.options import nearest
from d2ldev.program import spell
from d2ldev.typing import Inputs

TargetRule = Literal["compared", "left out", "none", "given"]
"""What becomes of the target of a batch.

The loss compares with it, or a prediction leaves it out. There is none for a loss of the prediction
alone, and for a model that computes its loss itself. Or it is given beside the mapping of inputs.
"""

_WEIGHTS = "sample_weight"


class Signature(NamedTuple):
    """The inputs with which a model is called.

    Args:
        names: of all inputs, in the order of the parameters.
        required: the names of the inputs without a default.
        most: how many inputs it takes by position; None for any number (``*args``).
        unnamed: the names of the inputs that can be given by position only.
        takes_names: whether it takes further inputs by name (``**kwargs``).
        switches: the names of parameters that the framework sets, such as ``training``.
    """

    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    most: int | None = None
    unnamed: frozenset[str] = frozenset()
    takes_names: bool = False
    switches: frozenset[str] = frozenset()

    @property
    def takes_every_name(self) -> bool:
        """Whether it has no input but ``**kwargs``."""
        return self.takes_names and not self.names

    @property
    def takes_one(self) -> bool:
        """Whether it needs one input, or has no names for its inputs (``*args``)."""
        return len(self.required) == 1 or (not self.names and self.most is None)

    def arrange(self, inputs: Inputs) -> Inputs:
        """Return inputs as the model is called with them: a tuple by position, a dict by name.

        Args:
            inputs: see ``Learner.step``.

        Raises:
            UnsupportedValueError: for a key that names no input, or if an input is missing.
        """
        if isinstance(inputs, (tuple, list)):  # asking for a mapping takes longer
            return inputs
        if not isinstance(inputs, Mapping):
            x = spell(inputs) or "X"
            raise UnsupportedValueError(
                f"call a model with {describe(inputs)}",
                "its inputs are a tuple, or a mapping of their names",
                f"({x},) in the place of {x}",
            )
        roles = find_roles(tuple(inputs.keys()), self, "given")
        if roles.passed_on:
            _warn_once(roles.passed_on, self.names)
        return roles.arrange(inputs)


class Roles(NamedTuple):
    """The roles of the keys of a batch.

    Args:
        inputs: the keys of the inputs; for a call by position, in this order.
        is_named: whether the model is called by name.
        is_whole: whether the mapping itself is the one input.
        target, weights: the keys of the target and of the weights; None without these.
        passed_on: the keys that only ``**kwargs`` takes.
    """

    inputs: tuple[Any, ...]
    is_named: bool = True
    is_whole: bool = False
    target: str | None = None
    weights: str | None = None
    passed_on: tuple[str, ...] = ()

    def arrange(self, batch: Mapping[Any, Any]) -> Inputs:
        """Return the inputs of a batch with these keys."""
        if self.is_named:
            return {key: batch[key] for key in self.inputs}
        values = (batch[key] for key in self.inputs)
        return (dict(zip(self.inputs, values, strict=True)),) if self.is_whole else tuple(values)


@lru_cache(maxsize=256)
def find_roles(keys: tuple[Any, ...], signature: Signature, rule: TargetRule) -> Roles:
    """Return the roles of the keys of a batch; see the module.

    Raises:
        UnsupportedValueError: if a key has no role, or an input or the target is missing.
    """
    names = signature.names
    weights = _WEIGHTS if _WEIGHTS in keys and _WEIGHTS not in names else None
    if weights and rule == "none":
        raise UnsupportedValueError(
            "weigh the examples of a batch",
            "nothing here compares with a target beside which the weights are given",
            "leave 'sample_weight' out, or loss=lambda prediction, y, sample_weight: ...",
        )
    target = "y" if "y" in keys and _has_target(signature, rule) else None
    rest = [key for key in keys if key is None or key not in (weights, target)]
    known = [key for key in rest if key in names or _is_passed(key, signature, is_alone=True)]
    others = [key for key in rest if key not in known]
    if rule == "compared" and target is None:
        if len(rest) < 2:
            raise _no_inputs_refusal(f"with {_list(keys) or 'no keys'}", rule)
        if not others:
            raise _no_target_refusal(known)
        if known and len(others) == 1 and isinstance(others[0], str):
            (target,) = others
            _check_target(target, known, signature)
            others = []
    if not known and not others:
        raise _no_inputs_refusal(f"with {_list(keys) or 'no keys'}", rule)
    if len(rest) == 1 and rest[0] not in names and signature.takes_one:
        return Roles((rest[0],), is_named=False, target=target, weights=weights)
    if not known and rule == "given" and signature.takes_one and not signature.takes_names:
        return Roles(tuple(others), False, is_whole=True, weights=weights)
    may_pass = target == "y" or rule == "given"
    passed_on = [x for x in others if may_pass and _is_passed(x, signature, is_alone=False)]
    unknown = [key for key in others if key not in passed_on]
    if unknown:
        raise _unknown_refusal(unknown, known, signature, rule)
    missing = [x for x in names if x in signature.required and x not in known]
    if missing:
        raise _lack_refusal(missing, known, target)
    if signature.unnamed.isdisjoint(known):
        inputs = (*known, *passed_on)
        return Roles(inputs, target=target, weights=weights, passed_on=tuple(passed_on))
    ordered = names[: 1 + max(names.index(key) for key in known)]
    if gap := [name for name in ordered if name not in known]:
        raise _gap_refusal(known, gap, ordered)
    return Roles(ordered, is_named=False, target=target, weights=weights)


@lru_cache(maxsize=256)
def _warn_once(passed_on: tuple[str, ...], names: tuple[str, ...]) -> None:
    warn(
        f"{', '.join(map(repr, passed_on))} of a batch goes to **kwargs of the model, because no "
        f"input has this name; its inputs are {', '.join(map(repr, names))}"
    )


def _has_target(signature: Signature, rule: TargetRule) -> bool:
    """Tell whether ``'y'`` is the target. A model that needs ``y`` predicts with it."""
    return rule == "compared" or (rule == "left out" and "y" not in signature.required)


def _is_passed(key: Any, signature: Signature, *, is_alone: bool) -> bool:
    """Tell whether ``**kwargs`` takes a key: alone, or beside inputs with names."""
    takes = signature.takes_every_name if is_alone else signature.takes_names
    return takes and isinstance(key, str) and key not in signature.switches


def separate(
    batch: Any, signature: Signature, rule: TargetRule, kinds: Kinds
) -> tuple[Inputs, Any]:
    """Return the inputs of a batch, and its target.

    Args:
        batch: a tuple of inputs and the target, a mapping, ``(mapping, target)``, or one input.
        signature: the inputs of the model.
        rule: what becomes of the target.
        kinds: of the framework. A mapping that moves by itself, and is not walked, is one input.

    Returns:
        The target is ``Weighted`` if the batch has weights, and None if it has none.

    Raises:
        UnsupportedValueError: if the batch lacks an input or the target, or has more than the model
            takes.
    """
    if _has_names(batch, kinds):
        return _take(batch, find_roles(tuple(batch.keys()), signature, rule))
    fields = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    if len(fields) in (1, 2) and _has_names(fields[0], kinds):
        return _separate_pair(fields, signature, rule, kinds)
    has_target = rule == "compared" or (rule == "left out" and len(fields) > 1)
    if has_target and len(fields) < 2:
        raise _no_inputs_refusal(describe(batch), rule)
    inputs, target = (fields[:-1], fields[-1]) if has_target else (fields, None)
    if not inputs:
        raise _no_inputs_refusal(describe(batch), rule)
    if signature.most is not None and len(inputs) > signature.most:
        raise _too_many_refusal(len(inputs), signature, has_target=has_target)
    return inputs, target


def _has_names(x: Any, kinds: Kinds) -> bool:
    return isinstance(x, Mapping) and kinds[type(x)] is not UNKNOWN


def _separate_pair(
    fields: tuple[Any, ...], signature: Signature, rule: TargetRule, kinds: Kinds
) -> tuple[Inputs, Any]:
    """Return the inputs and the target of ``(mapping, target)``, or of ``(mapping,)``."""
    mapping, *targets = fields
    if rule == "compared" and not targets:
        return separate(mapping, signature, rule, kinds)
    if rule == "none" and targets:
        raise UnsupportedValueError(
            f"call a model with a batch, {describe(fields)}",
            "nothing here compares with the target beside the mapping of inputs",
            "yield the mapping alone from the data, with the labels that the model takes",
        )
    roles = find_roles(tuple(mapping.keys()), signature, "given" if targets else rule)
    inputs, found = _take(mapping, roles)
    (target,) = targets or (found,)
    return inputs, Weighted(target, found.weights) if isinstance(found, Weighted) else target


def _take(batch: Mapping[Any, Any], roles: Roles) -> tuple[Inputs, Any]:
    target = None if roles.target is None else batch[roles.target]
    if roles.weights is not None:
        target = Weighted(target, batch[roles.weights])
    return roles.arrange(batch), target


# -- the errors -----------------------------------------------------------------------------------


def _list(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names))


def _no_target_refusal(known: list[Any]) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"train on a batch with the keys {_list(known)}",
        "each of them is an input of the model, and the loss compares with a target",
        "loss='model' if the model computes its loss itself; or yield the target as 'y'",
    )


def _check_target(key: Any, known: list[Any], signature: Signature) -> None:
    """Refuse a misspelt input, or a switch, as a target without the name ``'y'``."""
    near = _find_near(key, known, signature)
    if key in signature.switches or near:
        raise _unknown_refusal([key], known, signature, "compared")


def _no_inputs_refusal(batch: str, rule: TargetRule) -> UnsupportedValueError:
    """Return the error of a batch, which ``batch`` describes, without an input or a target."""
    if rule == "compared":
        return UnsupportedValueError(
            f"train on a batch {batch}",
            "a batch has inputs and a target",
            "yield (X, y) from the data: ArrayLoader(X, y, batch_size=32), or [(X, y)]",
        )
    return UnsupportedValueError(
        f"call a model with a batch {batch}",
        "it is empty, or has no input",
        "yield (X,) from the data",
    )


def _too_many_refusal(
    number: int, signature: Signature, *, has_target: bool
) -> UnsupportedValueError:
    besides, fix = "nothing here takes a target", "loss=lambda prediction, y: ..."
    if has_target:
        besides, fix = "a batch has one target beside them", "{'x': X, 'y': y}"
    return UnsupportedValueError(
        f"call a model with the {number} inputs of a batch",
        f"it takes {_list(signature.names)}, and {besides}",
        f"yield ({'X, y' if has_target else 'X,'}) from the data, or {fix}",
    )


def _find_near(key: Any, known: Iterable[Any], signature: Signature) -> str:
    """Return the input that a batch lacks whose name is near a key's; empty without one."""
    return nearest(key, [name for name in signature.names if name not in known])


def _unknown_refusal(
    unknown: list[Any], known: list[Any], signature: Signature, rule: TargetRule
) -> UnsupportedValueError:
    key = unknown[0]
    near = _find_near(key, known, signature)
    problem = f"the inputs of the model are {_list(signature.names)}"
    if not signature.names:
        problem = "the inputs of the model have no names"
    if key in signature.switches:
        problem += f", and {key!r} is set by the framework"
    if near:
        problem += f"; did you mean {near!r}?"
    fix = f"leave {key!r} out of the batch"
    if near:
        fix = f"name it {near!r}"
    elif not signature.names:
        fix = "yield a tuple, whose items are given by position: (X1, X2, y)"
    elif len(unknown) > 1 or not known:
        fix = f"name the inputs as the model does, {_list(signature.names)}"
    if rule == "compared":
        fix += "; the target is 'y'"
    elif rule == "left out":
        fix += "; only the target 'y' is left out"
    return UnsupportedValueError(
        f"call a model with the {'key' if len(unknown) == 1 else 'keys'} {_list(unknown)} of a "
        "batch",
        problem,
        fix,
    )


def _lack_refusal(missing: list[str], known: list[Any], target: Any) -> UnsupportedValueError:
    problem = f"the model also needs {_list(missing)}"
    entries = ", ".join(f"{name!r}: ..." for name in (*known, *missing))
    fix = f"yield {{{entries}}} in a batch"
    if target in missing:
        problem += f"; {target!r} is the target"
        fix = f"yield ({{{entries}}}, target)"
    return UnsupportedValueError(f"call a model with {_list(known)} of a batch", problem, fix)


def _gap_refusal(
    known: list[Any], gap: list[str], ordered: tuple[str, ...]
) -> UnsupportedValueError:
    entries = ", ".join(f"{name!r}: ..." for name in ordered)
    return UnsupportedValueError(
        f"call a model with {_list(known)}",
        f"it takes inputs by position, and a batch lacks {_list(gap)} before {ordered[-1]!r}",
        f"yield {{{entries}, 'y': y}}, or a tuple of all of them and y",
    )
