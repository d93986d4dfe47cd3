"""``show`` asks the framework of the model, whichever backend is active."""

import re

import optax
import pytest
from processes import FRAMEWORKS, run_python

import d2ldev


@pytest.mark.parametrize("active", FRAMEWORKS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_show_finds_the_framework_of_a_model(name, active, capsys):
    net = d2ldev.get_backend(name).mlp([3, 4, 1])
    with d2ldev.use_backend(active):
        d2ldev.show({"nets": [net]})
    *_, total = capsys.readouterr().out.splitlines()
    assert total.split() == ["total", "21", "21", "0", "<", "0.001", "float32", "cpu"]


def test_show_asks_for_the_models_of_two_frameworks_apart():
    nets = {name: d2ldev.get_backend(name).mlp([2, 1]) for name in ("torch", "jax")}
    message = " at jax is of the jax backend, and what comes first is of the torch backend"
    with pytest.raises(d2ldev.UnsupportedValueError, match=message) as caught:
        d2ldev.show(nets)
    assert caught.value.fix == "d2ldev.show(net), with the objects of one framework in each call"


@pytest.mark.parametrize("active", FRAMEWORKS)
def test_show_takes_the_state_of_an_optimizer_that_has_none(active, capsys):
    optimizer = optax.adam(0.1)
    with d2ldev.use_backend(active):
        message = "holds no tensor, and no model or optimizer of an imported framework"
        with pytest.raises(d2ldev.UnsupportedValueError, match=message) as caught:
            d2ldev.show(optimizer)
    assert caught.value.fix == "d2ldev.show(net), with a model or with the state of an optimizer"
    d2ldev.show(optimizer.init({"weight": d2ldev.jax.ones(3)}))
    assert re.search(r"total +6 ", capsys.readouterr().out)


def test_show_says_that_keras_computes_with_another_framework(tmp_path):
    code = """
        import d2ldev, keras
        try:
            d2ldev.show({"net": keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])})
        except d2ldev.UnsupportedValueError as error:
            show([error.problem, error.fix])
    """
    # The import of an optimizer of torch makes a folder.
    variables = {"KERAS_BACKEND": "torch", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ((problem, fix),) = run_python(code, hide=(), environment=variables)
    assert "is of no backend: Keras computes with torch in this process" in problem
    assert fix.startswith("KERAS_BACKEND=tensorflow")


def test_show_says_why_the_backend_of_a_tensor_cannot_be_used():
    code = """
        import d2ldev
        import jax.numpy as jnp
        x = jnp.ones(3)
        for tell in (d2ldev.show, d2ldev.backend_of):
            try:
                tell(x)
            except d2ldev.UnsupportedValueError as error:
                show([error.problem, error.fix])
    """
    told = run_python(code, hide=(), environment={"D2LDEV_VIRTUAL_GPUS": "2"})
    reason = "its backend fails: cannot make 2 virtual GPUs: JAX is in use already"
    assert [problem[: len(reason)] for problem, _ in told] == [reason, reason]
    assert {fix[:34] for _, fix in told} == {"use d2ldev's jax backend before JA"}
