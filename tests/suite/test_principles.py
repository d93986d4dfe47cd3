"""The design's principles, each held by the tests that carry its name."""

import array_api_strict as xp
import numpy as np
import pytest
from processes import FRAMEWORKS, make_backend, make_package, run_python

import d2ldev
from d2ldev import gpu
from d2ldev.framework.testing import framework_of

NATIVE = type(xp.zeros(0))
CREATIONS = {
    "asarray": lambda b: b.asarray([1.0]),
    "zeros": lambda b: b.zeros(1),
    "ones": lambda b: b.ones(1),
    "full": lambda b: b.full(1, 2.0),
    "arange": lambda b: b.arange(1),
    "rand": lambda b: b.rand(1),
    "randn": lambda b: b.randn(1),
    "from_dlpack": lambda b: b.from_dlpack(np.zeros(1)),
    "to": lambda b: b.to(xp.zeros(1), "gpu:0"),
    "copy": lambda b: b.copy(xp.zeros(1)),
    "place": lambda b: b.place(xp.zeros(1), "gpu:0"),
}


@pytest.mark.parametrize("make", CREATIONS.values(), ids=CREATIONS.keys())
def test_principle_native_tensors_in_native_tensors_out(reference, make):
    assert type(make(reference)) is NATIVE


def test_principle_importing_imports_no_framework():
    code = f"""
        import sys, d2ldev
        d2ldev.gpu(1), d2ldev.Device.parse("cuda:1"), d2ldev.available_backends()
        show(sorted(set({FRAMEWORKS}) & set(sys.modules)))
    """
    assert run_python(code, hide=()) == [[]]


def test_principle_a_process_that_asked_for_gpus_can_fork():
    code = """
        import os
        import d2ldev
        backend = d2ldev.get_backend("reference")
        backend.num_gpus(), backend.try_all_gpus(), backend.platform("cpu")
        child = os.fork()
        if child == 0:
            made = backend.ones(2, device="gpu:1")
            os._exit(0 if backend.device_of(made) is d2ldev.gpu(1) else 1)
        show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code) == [0]


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1"])
@pytest.mark.parametrize(
    "call",
    [
        lambda b, x, device: b.to(x, device),
        lambda b, x, device: b.place(x, device),
        lambda b, x, device: b.asarray(x, device=device),
        lambda b, x, device: b.asarray(x),
        lambda b, x, device: b.asarray(x, like=x),
    ],
    ids=["to", "place", "asarray on a device", "asarray", "asarray like itself"],
)
def test_principle_already_there_the_same_object_comes_back(reference, call, device):
    x = reference.ones(2, device=device)
    assert call(reference, x, device) is x


@pytest.mark.parametrize(
    "call",
    [
        lambda b, x: b.to([x, {"a": x}, 1], "cpu"),
        lambda b, x: b.place({"a": x}, "cpu"),
        lambda b, x: b.placement([x]),
        lambda b, x: b.device_of(x),
    ],
    ids=["to", "place", "placement", "device_of"],
)
def test_principle_a_copy_happens_only_where_the_user_wrote_one(reference, monkeypatch, call):
    copies = []
    monkeypatch.setattr(
        framework_of(reference).tensors, "transfer", lambda *given, **_: copies.append(given)
    )
    call(reference, reference.ones(2))
    assert copies == []


def test_principle_no_backend_is_special():
    code = """
        import importlib.metadata
        importlib.metadata.entry_points = lambda **_: ()
        import d2ldev
        for name in ("torch", "reference"):
            try:
                d2ldev.get_backend(name)
            except d2ldev.UnknownBackendError as error:
                show(error.fix)
    """
    fixes = run_python(code)
    assert [each.startswith("pip install ") for each in fixes] == [True, True]
    assert all("from its source tree alone no backend is found" in each for each in fixes)


def test_principle_no_backend_is_special_not_even_by_its_name(tmp_path):
    path = [make_backend(tmp_path, "reference")]
    code = """
        import d2ldev
        from d2ldev._backend import framework_of
        show(type(framework_of(d2ldev.get_backend('reference'))).__module__)
    """
    assert run_python(code, path=path) == ["reference_backend.wiring"]


@pytest.mark.parametrize(
    ("name", "error"), [("torhc", "UnknownBackendError"), ("torch", "BackendNotInstalledError")]
)
def test_principle_no_silent_fallback_of_the_backend(name, error):
    code = """
        import d2ldev
        try:
            d2ldev.backend.num_gpus()
        except d2ldev.D2LDevError as error:
            text = str(error)
            show([type(error).__name__, "known: " in text, "(from D2LDEV_BACKEND=" in text])
    """
    assert run_python(code, environment={"D2LDEV_BACKEND": name}) == [[error, True, True]]


def test_principle_no_silent_fallback_when_what_is_installed_is_broken(tmp_path):
    make_package(tmp_path, "torch")
    make_backend(tmp_path, "torch", requires=["torch"], source="raise OSError('broken')")
    code = """
        import d2ldev
        try:
            d2ldev.backend.num_gpus()
        except d2ldev.BackendNotInstalledError as error:
            show("OSError: broken" in str(error))
    """
    assert run_python(code, path=[tmp_path]) == [True]


@pytest.mark.parametrize("call", ["zeros(2, device=there)", "to(backend.ones(2), there)"])
def test_principle_no_silent_fallback_of_the_device(reference, call):
    with pytest.raises(d2ldev.DeviceUnavailableError, match="on gpu:2"):
        eval(f"backend.{call}", {"backend": reference, "there": gpu(2)})


def test_principle_no_global_state_is_changed():
    code = """
        import os, sys, random, locale, warnings
        import numpy as np, array_api_strict as xp

        def state():
            return [
                dict(os.environ), list(sys.path), sys.getrecursionlimit(), len(warnings.filters),
                repr(random.getstate()), repr(np.random.get_state()), np.geterr(),
                np.get_printoptions(), repr(xp.get_array_api_strict_flags()), os.getcwd(),
            ]

        before = state()
        from d2ldev import backend, gpu
        with gpu(1):
            net = backend.mlp([3, 4, 1])
            backend.rand((2, 3), seed=1)
            backend.placement(backend.place(net, "gpu:0"))
        show([str(was) for was, now in zip(before, state()) if str(was) != str(now)])
    """
    assert run_python(code, environment={"D2LDEV_BACKEND": "reference"}) == [[]]


ERRORS = {
    "an index that is none": lambda b: d2ldev.gpu(-1),
    "a kind that is none": lambda b: d2ldev.Device("tpu"),
    "a spelling that is none": lambda b: b.device("gpu:x"),
    "a device of another framework": lambda b: b.device(object()),
    "a device that is not there": lambda b: b.zeros(1, device="gpu:7"),
    "a place that is not there": lambda b: b.to(b.zeros(1), "gpu:7"),
    "a scope that is not there": lambda b: b.on("gpu:7").__enter__(),
    "an unknown value in a batch": lambda b: b.to([object()], "gpu:0"),
    "a cycle": lambda b: b.to((lambda x: x.append(x) or x)([b.zeros(1)]), "gpu:0"),
    "a dtype that is none": lambda b: b.zeros(1, dtype="bfloat16"),
    "a ragged list": lambda b: b.asarray([[1], [1, 2]]),
    "a text": lambda b: b.asarray("text"),
    "what has no DLPack": lambda b: b.from_dlpack("text"),
    "no tensor as an array": lambda b: b.to_numpy("text"),
    "no tensor's device": lambda b: b.device_of("text"),
    "no tensor's backend": lambda b: d2ldev.backend_of("text"),
    "a model of one size": lambda b: b.mlp([1]),
    "no model": lambda b: b.place(object(), "cpu"),
    "an unknown backend": lambda b: d2ldev.get_backend("no such backend"),
    "no backend": lambda b: d2ldev.get_backend(1),
    "virtual GPUs that are too many": lambda b: d2ldev.virtual_gpus(9),
    "virtual GPUs that come too late": lambda b: d2ldev.virtual_gpus(1),
}


@pytest.mark.parametrize("fail", ERRORS.values(), ids=ERRORS.keys())
def test_principle_every_error_names_what_was_attempted_and_the_line_that_fixes_it(reference, fail):
    with pytest.raises(d2ldev.D2LDevError) as error:
        fail(reference)
    attempted = error.value.attempted.removesuffix(",")
    assert str(error.value).startswith(f"cannot {attempted}: {error.value.problem}")
    assert all([error.value.attempted, error.value.problem, error.value.fix])


@pytest.mark.parametrize(
    "name",
    [
        "a device that is not there",
        "a place that is not there",
        "a scope that is not there",
        "virtual GPUs that come too late",
    ],
)
def test_principle_every_error_names_the_devices_involved(reference, name):
    with pytest.raises(d2ldev.D2LDevError) as error:
        ERRORS[name](reference)
    assert error.value.devices == ("cpu", "gpu:0", "gpu:1")
