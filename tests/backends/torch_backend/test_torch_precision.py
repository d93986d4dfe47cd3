"""torch's switches: the old interface and the new one are set alike, and each is put back."""

import itertools
import warnings

import pytest
import torch
from d2ldev_torch import precision
from torch._dynamo.testing import CompileCounter

import d2ldev

needs_new = pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"),
    reason="fp32_precision came with torch 2.9",
)
OPERATIONS = ("matmul", "conv", "rnn", "all")


@pytest.fixture(autouse=True)
def _put_back():
    restore = precision.set_matmul_precision("highest")
    restore()
    yield
    restore()


def of_the_new():
    """Return what each library computes each kind of operation in."""
    get = torch._C._get_fp32_precision_getter
    keys = itertools.product(("cuda", "mkldnn"), OPERATIONS)
    return {key: get(*key) for key in keys} | {"general": torch.backends.fp32_precision}


def ask(function):
    try:
        return function()
    except RuntimeError:
        return "refused"


def state():
    """Return what everybody can ask of torch."""
    return (
        ask(torch.get_float32_matmul_precision),
        ask(lambda: torch.backends.cudnn.allow_tf32),
        ask(lambda: torch.backends.cuda.matmul.allow_tf32),
        of_the_new() if hasattr(torch._C, "_get_fp32_precision_getter") else None,
    )


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_products_and_convolutions_are_set_alike(name):
    with d2ldev.torch.matmul_precision(name) as found:
        assert found == name
        assert torch.get_float32_matmul_precision() == name
        assert torch.backends.cuda.matmul.allow_tf32 is (name != "highest")
        assert torch.backends.cudnn.allow_tf32 is (name != "highest")


@needs_new
@pytest.mark.parametrize(
    ("name", "cuda", "mkldnn"),
    [("highest", "ieee", "ieee"), ("high", "tf32", "tf32"), ("medium", "tf32", "bf16")],
)
def test_every_kind_of_operation_is_set_whatever_the_general_setting_is(name, cuda, mkldnn):
    torch.backends.fp32_precision = "tf32"
    with d2ldev.torch.matmul_precision(name):
        assert of_the_new() == {
            **{("cuda", operation): cuda for operation in OPERATIONS},
            **{("mkldnn", operation): mkldnn for operation in OPERATIONS},
            "general": torch.backends.fp32_precision,
        }


@pytest.mark.parametrize("convolutions", [True, False])
@pytest.mark.parametrize("products", ["highest", "high", "medium"])
def test_what_the_old_interface_has_set_is_put_back(products, convolutions):
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
    before = state()
    with d2ldev.torch.matmul_precision("high"):
        pass
    assert state() == before


CHANGES = {
    "nothing": lambda: None,
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "a library": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    "products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "on the CPU": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@needs_new
@pytest.mark.parametrize("name", ["highest", "high", "medium"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_new_interface_has_set_is_put_back_where_the_old_one_refuses_to_answer(
    change, name
):
    change()
    before = state()
    with d2ldev.torch.matmul_precision(name):
        assert "refused" not in state()
    assert state() == before


@needs_new
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_had_no_precision_of_its_own_follows_the_general_one_as_before(change):
    change()
    torch.backends.fp32_precision = "none"
    expected = state()
    torch.backends.fp32_precision = "tf32"
    with d2ldev.torch.matmul_precision("highest"):
        pass
    torch.backends.fp32_precision = "none"
    assert state() == expected


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_a_torch_without_the_new_interface_has_the_old_one(monkeypatch, name):
    monkeypatch.setattr(precision, "_HAS_NEW", False)
    torch.set_float32_matmul_precision("highest")
    before = state()[:3]
    with d2ldev.torch.matmul_precision(name) as found:
        assert found == name
        assert torch.backends.cudnn.allow_tf32 is (name != "highest")
    assert state()[:3] == before


def test_on_cuda_the_least_precise_is_what_is_said(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    assert d2ldev.torch.matmul_precision() == "high"
    monkeypatch.setattr(precision, "_HAS_NEW", False)
    assert d2ldev.torch.matmul_precision() == "high"


def test_a_failure_halfway_leaves_nothing_set(monkeypatch):
    before = state()

    def fail(*_):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(precision, "_set_old", fail)
    with pytest.raises(MemoryError):
        d2ldev.torch.matmul_precision("medium")
    assert state() == before


def test_a_compiled_function_compiles_again_in_another_precision():
    counter = CompileCounter()
    double = torch.compile(lambda x: x @ x, backend=counter)
    x = torch.ones(2, 2)
    for name in ("highest", "high", "highest", "high"):
        with d2ldev.torch.matmul_precision(name):
            assert double(x).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert counter.frame_count == 2


def test_what_torch_advises_against_its_old_interface_is_not_said_to_the_user(monkeypatch):
    def warn_of(function):
        def advise(*arguments):
            warnings.warn("Please use the new API settings", UserWarning, stacklevel=2)
            return function(*arguments)

        return advise

    for name in ("get_float32_matmul_precision", "set_float32_matmul_precision"):
        monkeypatch.setattr(torch, name, warn_of(getattr(torch, name)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with d2ldev.torch.matmul_precision("high"):
            assert d2ldev.torch.matmul_precision() == "high"
    assert caught == []
