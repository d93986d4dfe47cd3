"""D2L 6.7.2.1, "Storage on the GPU": where a tensor is made when the call does not say it."""

from __future__ import annotations

import pytest

import d2ldev
from d2ldev import DeviceUnavailableError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import creators

SECTION = "6.7.2.1"


@requirement("create.default-is-the-cpu", section=SECTION)
@creators
def test_without_a_device_a_tensor_is_made_on_the_cpu(backend, make):
    assert backend.device_of(make(backend)) is backend.cpu()


@requirement("create.in-a-scope", section=SECTION)
@creators
def test_a_scope_gives_the_device(backend, place, make):
    with backend.on(place):
        x = make(backend)
    assert backend.device_of(x) is place


@requirement("create.a-device-beats-the-scope", section=SECTION)
@creators
@pytest.mark.needs_gpus(1)
def test_an_explicit_device_overrides_the_scope(backend, make):
    with backend.on("gpu:0"):
        x = make(backend, device="cpu")
    assert backend.device_of(x) is backend.cpu()


@requirement("create.device-as-a-context", section=SECTION)
def test_a_device_is_a_context_for_the_active_backend(backend, place):
    with d2ldev.use_backend(backend), place:
        x = backend.ones(2)
    assert backend.device_of(x) is place
    assert backend.device_of(backend.ones(2)) is backend.cpu()


@requirement("create.scopes-nest", section=SECTION)
def test_scopes_nest(backend, place):
    with backend.on(place):
        with backend.on("cpu"):
            inner = backend.ones(1)
        outer = backend.ones(1)
    assert backend.device_of(inner) is backend.cpu()
    assert backend.device_of(outer) is place


@requirement("create.scopes-end", section=SECTION)
def test_a_scope_ends_also_with_an_exception(backend, place):
    before = backend.default_device()
    with pytest.raises(ZeroDivisionError), backend.on(place):
        1 / 0  # noqa: B018
    assert backend.device_of(backend.ones(1)) is backend.cpu()
    assert backend.default_device() is before


@requirement("create.scope-on-a-missing-device", section=SECTION)
def test_a_scope_on_a_missing_device_is_an_error(backend, missing):
    with pytest.raises(DeviceUnavailableError, match=str(missing)), backend.on(missing):
        pass


@requirement("create.like-beats-the-scope", section=SECTION)
def test_like_beats_the_scope(backend, route):
    scope, there = route
    like = backend.ones(1, device=there)
    with backend.on(scope):
        made = [backend.ones(2, like=like), backend.asarray([1.0], like=like)]
        made += [backend.rand(2, like=like), backend.arange(2, like=like)]
    assert [backend.device_of(x) for x in made] == [there] * len(made)


@requirement("create.a-tensor-stays-in-a-scope", section=SECTION)
def test_a_tensor_stays_where_it_is_in_a_scope(backend, route):
    scope, there = route
    x = backend.ones(2, device=there)
    with backend.on(scope):
        assert backend.asarray(x) is x
        assert backend.to(x, there) is x
        assert backend.device_of(backend.asarray(x, dtype="int32")) is there


@requirement("copy.a-device-beats-the-scope", section=SECTION)
def test_to_and_copy_use_the_given_device_also_in_a_scope(backend, route):
    scope, target = route
    x = backend.ones(2, device=scope)
    with backend.on(scope):
        moved, copied = backend.to(x, target), backend.copy(x, target)
        batch = backend.to([x], target)
    assert [backend.device_of(y) for y in (moved, copied, *batch)] == [target] * 3
