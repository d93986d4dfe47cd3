"""Models, optimizers and tensors of one framework that another one's backend is given."""

import mxnet as mx
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from conftest import NAMES
from flax import linen, nnx
from mxnet import gluon
from processes import run_python

import d2ldev
from d2ldev import ArrayLoader, Trainer, UnsupportedValueError


def _keras():
    import keras  # after TensorFlow's backend was made

    return keras


def _gluon_net():
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    return net


def _linen_variables():
    jnp = d2ldev.jax
    return {"params": {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}}


OBJECTS = {
    "torch": {
        "a module": lambda: torch.nn.Linear(2, 1),
        "an optimizer": lambda: torch.optim.Adam(torch.nn.Linear(2, 1).parameters()),
        "a tensor": lambda: torch.ones(2),
    },
    "jax": {
        "a module of nnx": lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
        "a module of linen": lambda: linen.Dense(1),
        "variables of linen": _linen_variables,
        "an optimizer of nnx": lambda: nnx.Optimizer(
            nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param
        ),
        "an optimizer of optax": lambda: optax.adam(0.1),
        "a state of optax": lambda: optax.adam(0.1).init(_linen_variables()),
        "an array": lambda: d2ldev.jax.ones(2),
    },
    "tensorflow": {
        "a model": lambda: _keras().Sequential([_keras().Input((2,)), _keras().layers.Dense(1)]),
        "a layer": lambda: _keras().layers.Dense(1),
        "an optimizer": lambda: _keras().optimizers.Adam(),
        "a metric": lambda: _keras().metrics.Mean(),
        "a tensor": lambda: tf.ones(2),
        "a variable": lambda: tf.Variable([1.0, 2.0]),
    },
    "mxnet": {
        "a block": _gluon_net,
        "a trainer": lambda: gluon.Trainer(_gluon_net().collect_params(), "adam"),
        "an array": lambda: mx.np.ones(2),
    },
}
CASES = [
    (owner, name, other)
    for owner, objects in OBJECTS.items()
    for name in objects
    for other in NAMES
    if other != owner
]
PAIRS = [(owner, other) for owner in OBJECTS for other in NAMES if other != owner]
TENSORS = {"a tensor", "an array", "a variable", "variables of linen", "a state of optax"}
CALLS = {
    "place": lambda backend, x, _: backend.place(x, "cpu"),
    "placement": lambda backend, x, _: backend.placement(x),
    "copy": lambda backend, x, _: backend.copy(x),
    "replicate": lambda backend, x, _: backend.replicate(x, ["cpu", "gpu:0"]),
    "device_of": lambda backend, x, _: backend.device_of(x),
    "to_numpy": lambda backend, x, _: backend.to_numpy(x),
    "save": lambda backend, x, path: backend.save(x, path),
    "load_into": lambda backend, x, _: backend.load_into(x, {}),
    "learner": lambda backend, x, _: backend.learner(x),
}
DATA = ArrayLoader(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=2)


def _assert_named(call, owner, other):
    with pytest.raises(UnsupportedValueError) as caught:
        call()
    assert f"is of the {owner} backend, and this is the {other} backend" in caught.value.problem
    assert f"D2LDEV_BACKEND={owner}, or backend = d2ldev.get_backend('{owner}')" in caught.value.fix


@pytest.fixture(autouse=True)
def _torch_writes_here(monkeypatch, tmp_path):
    """An optimizer of torch imports its compiler, which makes a folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.mark.parametrize(("owner", "name", "other"), CASES)
def test_every_call_names_the_framework_of_an_object(owner, name, other, tmp_path):
    backend, x = d2ldev.get_backend(other), OBJECTS[owner][name]()
    calls = dict(CALLS)
    if name not in TENSORS:  # the values of tensors are data, which move
        calls["to"] = lambda backend, x, _: backend.to(x, "cpu")
    for call in calls.values():
        _assert_named(lambda call=call: call(backend, x, tmp_path / "file"), owner, other)


@pytest.mark.parametrize(("owner", "other"), PAIRS)
def test_fit_names_the_framework_of_a_model_and_of_an_optimizer(owner, other):
    backend = d2ldev.get_backend(other)
    with d2ldev.use_backend(other):
        trainer = Trainer(max_epochs=1, num_gpus=0)
        for make in OBJECTS[owner].values():
            x = make()
            _assert_named(lambda x=x: trainer.fit(x, DATA), owner, other)
            net = backend.mlp([2, 1])
            _assert_named(lambda x=x, net=net: trainer.fit(net, DATA, optimizer=x), owner, other)


LOSSES = {
    "torch": lambda: [torch.nn.MSELoss(), torch.nn.functional.mse_loss],
    "jax": lambda: [optax.l2_loss],
    "tensorflow": lambda: [tf.keras.losses.MeanSquaredError(), _keras().losses.mean_squared_error],
    "mxnet": lambda: [gluon.loss.L2Loss()],
}


@pytest.mark.parametrize(("owner", "other"), PAIRS)
def test_fit_names_the_framework_of_a_loss_and_of_a_metric(owner, other):
    backend = d2ldev.get_backend(other)
    trainer = Trainer(max_epochs=1, num_gpus=0, backend=backend)
    for loss in LOSSES[owner]():
        for options in ({"loss": loss}, {"metrics": [loss]}):
            net = backend.mlp([2, 1])
            with pytest.raises(UnsupportedValueError) as caught:
                trainer.fit(net, DATA, **options)
            assert owner in caught.value.problem
            assert f"this is the {other} backend" in caught.value.problem


def _holder(name, net, kept):
    """Return a model of a framework that keeps a model of another one in an attribute."""
    if name == "tensorflow":
        net = tf.Module()
    net.teacher = kept
    return net


# A model of the reference backend takes no attributes.
HOLDERS = [(owner, other) for owner, other in PAIRS if other in OBJECTS]


@pytest.mark.parametrize(("owner", "other"), HOLDERS)
def test_place_and_save_name_the_framework_of_foreign_tensors(owner, other, tmp_path):
    backend = d2ldev.get_backend(other)
    kept = next(iter(OBJECTS[owner].values()))()
    net = _holder(other, backend.mlp([2, 1]), kept)
    # It is told once of each class.
    net.__class__ = type("Holder", (type(net),), {})
    told = f"teacher is of the {owner} backend, and this is the {other} backend"
    with pytest.warns(d2ldev.D2LDevWarning, match=told):
        backend.place(net, backend.cpu())
    with pytest.warns(d2ldev.D2LDevWarning, match="has no teacher"):
        backend.save(net, tmp_path / "net")


PROGRAM = """
    import keras, d2ldev
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for name in ("{0}", "tensorflow"):
        backend = d2ldev.get_backend(name)
        for x in (net, net.layers[0].kernel, keras.optimizers.Adam(), keras.metrics.Mean()):
            try:
                backend.place({{"x": x}}, "cpu")
            except d2ldev.UnsupportedValueError as error:
                show([error.problem.partition(", a")[2].partition(" is of ")[2], error.fix])
"""


@pytest.mark.nightly
def test_keras_on_pytorch_is_refused(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    shown = run_python(PROGRAM.format("torch"), hide=())
    assert shown == 8 * [
        [
            "no backend: Keras computes with torch in this process, and d2ldev takes Keras "
            "objects on tensorflow and jax alone",
            "KERAS_BACKEND=tensorflow, before Keras is imported, and D2LDEV_BACKEND=tensorflow",
        ]
    ]
