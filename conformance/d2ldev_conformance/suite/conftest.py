"""What the suite's tests are given: a backend, its places, its dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import d2ldev
from d2ldev import Backend, Device, settings
from d2ldev.contract.abilities import require
from d2ldev.framework.testing import CREATIONS, DERIVATIONS, framework_of
from d2ldev.options import LossName
from d2ldev_conformance.leaks import LeakError, children_use, detect_leaks
from d2ldev_conformance.plugin import backend_under_test, freeze_what_is_loaded
from d2ldev_conformance.provision import (
    attention_models,
    buffers,
    check_provided,
    classifiers,
    composites,
    freezables,
    gradients,
    list_provided,
    loops,
    models_of_sequences,
    models_with_branches,
    models_with_losses,
    models_with_masks,
    models_with_permutations,
    models_with_tables,
    models_without_parameters,
    modes,
    modules,
    networks,
    networks_with_batch_norm,
    optimizer_states,
    own_optimizers,
    own_tensors,
    parameter_orders,
    samples,
    ties,
    untrainable_models,
    views,
)
from d2ldev_conformance.requirement import module_of

PLACES = (
    pytest.param("cpu", id="cpu"),
    pytest.param("gpu:0", id="gpu0", marks=pytest.mark.needs_gpus(1)),
    pytest.param("gpu:1", id="gpu1", marks=pytest.mark.needs_gpus(2)),
)
# From where to where: every direction there is.
ROUTES = (
    pytest.param(("cpu", "gpu:0"), id="cpu-gpu0", marks=pytest.mark.needs_gpus(1)),
    pytest.param(("gpu:0", "cpu"), id="gpu0-cpu", marks=pytest.mark.needs_gpus(1)),
    pytest.param(("gpu:0", "gpu:1"), id="gpu0-gpu1", marks=pytest.mark.needs_gpus(2)),
    pytest.param(("gpu:1", "gpu:0"), id="gpu1-gpu0", marks=pytest.mark.needs_gpus(2)),
)


# The argument of a test -> what the backend provides for it, by name.
PROVIDED = {
    "attention_model": attention_models,
    "model_with_branches": models_with_branches,
    "buffered": buffers,
    "composite": composites,
    "sample": samples,
    "network": networks,
    "normalized_network": networks_with_batch_norm,
    "own_optimizer": own_optimizers,
    "classifier": classifiers,
    "freezable": freezables,
    "graded": gradients,
    "frozen_model": untrainable_models,
    "loop": loops,
    "loss_model": models_with_losses,
    "masked_model": models_with_masks,
    "model_of_sequences": models_of_sequences,
    "model_without_parameters": models_without_parameters,
    "moded": modes,
    "module": modules,
    "optimized": optimizer_states,
    "parameter_order": parameter_orders,
    "permuted": models_with_permutations,
    "table": models_with_tables,
    "tied": ties,
    "viewed": views,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the places, routes, dtypes, and what the backend provides for the suite."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", backend_under_test(metafunc.config).dtype_names)
    if "place" in metafunc.fixturenames:
        places: tuple[object, ...] = PLACES
        if module_of(metafunc.definition.path) == "training":
            # A step takes long. On the first GPU the trainer's tests take the same ones.
            last = 2 if backend_under_test(metafunc.config).num_gpus() > 1 else 1
            places = PLACES[0], PLACES[last]
        metafunc.parametrize("place", places, indirect=True)
    if "route" in metafunc.fixturenames:
        metafunc.parametrize("route", ROUTES, indirect=True)
    if "derivation" in metafunc.fixturenames:
        given = list_provided(backend_under_test(metafunc.config), own_tensors)
        others = [name for name in given if name not in (*CREATIONS, *DERIVATIONS)]
        metafunc.parametrize("derivation", [*DERIVATIONS, *others])
    for argument, provide in PROVIDED.items():
        if argument in metafunc.fixturenames:
            missing = pytest.mark.not_provided(provide.__name__)
            nothing = pytest.param(None, id="none", marks=missing)
            names = list_provided(backend_under_test(metafunc.config), provide)
            metafunc.parametrize(argument, names or [nothing])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End a test for which the backend provides nothing."""
    for mark in item.iter_markers("not_provided"):
        check_provided(backend_under_test(item.config), *mark.args)


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Iterator[Backend]:
    """The backend under test.

    It multiplies in float32, and so do the processes that tests start. What a framework does if
    nobody asks may be too coarse for the comparisons of the suite.
    """
    backend = backend_under_test(pytestconfig)
    with pytest.MonkeyPatch.context() as patched:
        put_back = None
        if "multiply in float32" not in framework_of(backend).cannot:
            patched.setenv(settings.MATMUL_PRECISION, "highest")
            put_back = framework_of(backend).devices.set_matmul_precision("highest")
        yield backend
        if put_back is not None:
            put_back()


# The first use of a part of a framework leaves traces, which are not leaks of a test. torch's
# first optimizer step sets an environment variable and replaces ``torch.manual_seed``. TensorFlow's
# AutoGraph keeps the source that it generated in a file.
@pytest.fixture(scope="session")
def _warm_models(backend: Backend) -> None:
    """Make an object of every kind once, as far as the author has begun with it."""
    for make in samples(backend).values():
        with suppress(Exception):  # it fails again in the test that needs it
            make(backend.cpu())
    freeze_what_is_loaded()


@pytest.fixture(scope="session")
def _warm_training(backend: Backend, _warm_models: None) -> None:
    """Train a model once, as far as the author has begun with it."""
    with suppress(Exception):  # as above
        targets: dict[LossName, Any] = {
            "mse": backend.ones((1, 1)),
            "cross_entropy": backend.zeros(1, dtype="int32"),
        }
        for loss, y in targets.items():
            learner = backend.learner(backend.mlp([1, 1]), loss=loss, gradient_clip_val=1)
            for teach in (learner.step, learner.evaluate):
                teach((backend.ones((1, 1)),), y)
    freeze_what_is_loaded()


# What a test of a module needs to have been used once.
_WARM = {
    **dict.fromkeys(("models", "files", "strict"), "_warm_models"),
    **dict.fromkeys(("training", "parallel"), "_warm_training"),
}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Device:
    """Each device in turn."""
    return Device.parse(request.param)


@pytest.fixture
def route(request: pytest.FixtureRequest) -> tuple[Device, Device]:
    """Each pair of different devices in turn: from, to."""
    source, target = request.param
    return Device.parse(source), Device.parse(target)


@pytest.fixture
def missing(backend: Backend) -> Device:
    """A GPU that does not exist."""
    return d2ldev.gpu(backend.num_gpus())


@pytest.fixture
def other_float(backend: Backend) -> str:
    """A floating dtype that is not the default one; float32 where the framework has no other."""
    names = ("float64", "float16", "bfloat16")
    return next((name for name in names if name in backend.dtype_names), "float32")


@pytest.fixture(autouse=True)
def _has_abilities(request: pytest.FixtureRequest, backend: Backend) -> None:
    """Fail with the refusal of a framework that lacks what ``needs`` names: the report counts it.

    A test needs the mark if it expects an error, or compares numbers. Any other test fails with the
    same refusal.
    """
    for mark in request.node.iter_markers("needs"):
        for ability in mark.args:
            require(framework_of(backend), ability, "run this test")


@pytest.fixture
def X(backend: Backend) -> Any:  # noqa: N802  # the chapter's name
    """``X = torch.ones(2, 3, device=try_gpu())``."""
    return backend.ones((2, 3), device=backend.try_gpu())


@pytest.fixture
def Y(backend: Backend) -> Any:  # noqa: N802
    """``Y = torch.rand(2, 3, device=try_gpu(1))``."""
    return backend.rand((2, 3), device=backend.try_gpu(1))


@pytest.fixture
def Z(backend: Backend, X: Any) -> Any:  # noqa: N802, N803
    """``Z = X.cuda(1)``."""
    return backend.to(X, backend.gpu(1))


@pytest.fixture
def mutable(backend: Backend) -> None:
    """Skips where a framework's tensors cannot be written to."""
    x = backend.zeros(1)
    try:
        x[0] = 1.0
    except TypeError:
        pytest.skip(f"tensors of {backend.name} are immutable")


@pytest.fixture
def virtual(backend: Backend) -> None:
    """Skips where the GPUs are real: their kernels add in other orders than the CPU's."""
    if backend.platform(d2ldev.gpu(0)) != "virtual":
        pytest.skip(f"the GPUs of {backend.name} are real here")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    """Look for leaks before any fixture of a test is made, so that each ends before the last look.

    A plugin whose own fixture asks for ``monkeypatch`` would have it made before.
    """
    if fixturedef.scope == "function" and fixturedef.argname != "_leaves_no_trace":
        request.getfixturevalue("_leaves_no_trace")


@pytest.fixture(scope="session")
def _for_leaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("leaks")
    with children_use(folder):
        yield folder


@pytest.fixture(autouse=True)
def _leaves_no_trace(
    backend: Backend, _for_leaks: Path, request: pytest.FixtureRequest
) -> Iterator[None]:
    """A test that leaks anything, the framework's default device included, has failed."""
    if warm := _WARM.get(module_of(request.path)):
        request.getfixturevalue(warm)
    # Without a class of tensors the author has not begun with them.
    first = framework_of(backend).tensors.types[:1]
    frameworks = [sys.modules[cls.__module__.partition(".")[0]] for cls in first]
    before, precision = backend.default_device(), backend.matmul_precision()
    try:
        with detect_leaks(frameworks, _for_leaks):
            yield
    except LeakError:
        # After Ctrl-C pytest leaves the working directory before the test has come to its end.
        if request.session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        raise
    assert backend.default_device() is before, "the framework's default device was changed"
    assert backend.matmul_precision() == precision, "the precision of products was changed"
