"""Several processes: a multi-worker strategy between processes of one virtual GPU each.

All models are trained in one launch, because TensorFlow takes seconds to begin.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from launched import run_processes
from ports import free_port
from processes import WITHOUT_GPUS
from several_gpus import CLASSES, FEATURES, PAIR, TOLERANCE, flat_batches, train
from test_tensorflow_parallel import drop_some, own_output

from d2ldev import Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of

layers = keras.layers


def sequential(*parts):
    return keras.Sequential([*parts])


def dense(**options):
    return sequential(keras.Input((FEATURES,)), layers.Dense(CLASSES, **options))


def compile_model():
    net = dense()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.1), loss)
    return net


def freeze_layer():
    net = sequential(keras.Input((FEATURES,)), layers.Dense(8), layers.Dense(CLASSES))
    net.layers[0].trainable = False
    return net


def normalize(**options):
    norm = layers.BatchNormalization(momentum=0.5, **options)
    return sequential(keras.Input((FEATURES,)), norm, layers.Dense(CLASSES))


def embed():
    return sequential(
        keras.Input((3,), dtype="int32"),
        layers.Embedding(11, 4),
        layers.Flatten(),
        layers.Dense(CLASSES),
    )


def of_two_dtypes():
    return sequential(
        keras.Input((FEATURES,)), layers.Dense(4, dtype="float64"), layers.Dense(CLASSES)
    )


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(CLASSES)

    def call(self, x):
        return self.dense(x)

    def training_step(self, batch):
        x, y = batch
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, self(x))


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones((FEATURES, CLASSES)))
        self.count = tf.Variable(0, trainable=False)
        self.unused = tf.Variable(1.0)

    def __call__(self, x):
        return x @ self.weight


def words():
    random = np.random.default_rng(0)
    return [
        (random.integers(0, 11, (n, 3)).astype("int32"), np.arange(n, dtype="int32") % CLASSES)
        for n in (5, 4, 1)
    ]


def even():
    return flat_batches(8, 4)


def leave_out_weights():
    x, y = flat_batches(4, 4)[0]
    return [{"x": x, "y": y, "sample_weight": np.zeros(4, "float32")}]


def huge():
    x, y = flat_batches(4, 4)[0]
    x = x.copy()
    x[3] = 1e6  # a gradient that no float16 holds, in the part of the last process
    return [(x, y), *flat_batches(4, 4)]


def shuffle():
    ((x, y),) = flat_batches(13, 13)
    tf.random.set_seed(0)  # a part of the seed of the order
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(13, seed=0).batch(5)


# On the CPU and on virtual GPUs in turn. What every framework does is asked by the suite.
CASES = {
    "own step": (Own, flat_batches, {"loss": None, "lr": 0.1}),
    "compiled": (compile_model, flat_batches, {"loss": None}),
    "module": (Scale, flat_batches, {"lr": 0.1}),
    "unbuilt": (lambda: sequential(layers.Dense(CLASSES)), flat_batches, {"lr": 0.1}),
    "frozen": (freeze_layer, flat_batches, {"optimizer": "adam"}),
    "embedded": (embed, words, {"optimizer": "adam"}),
    "embedded and clipped": (embed, words, {"gradient_clip_val": 0.1}),
    "two dtypes": (of_two_dtypes, flat_batches, {"lr": 0.1}),
    "regularized": (lambda: dense(kernel_regularizer="l2"), leave_out_weights, {"lr": 0.1}),
    "clips": (dense, flat_batches, {"optimizer": lambda: sgd(global_clipnorm=0.1)}),
    "clips and scales": (dense, flat_batches, {"optimizer": lambda: make_scale(clipvalue=0.01)}),
    "accumulates": (dense, flat_batches, {"optimizer": lambda: sgd(gradient_accumulation_steps=2)}),
    "bf16": (
        dense,
        flat_batches,
        {"precision": "bf16", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
    "left out": (dense, huge, {"precision": "fp16"}),
    "synchronized": (
        lambda: normalize(synchronized=True),
        even,
        {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "lr": 0.1},
    ),
    "a dataset": (dense, shuffle, {"lr": 0.1}),
    "a part of a dataset": (dense, shuffle, {"lr": 0.1, "reads_shard": True}),
    "normalized": (normalize, even, {"lr": 0.1}),
    "dropped": (drop_some, lambda: PAIR, {"loss": own_output}),
}
_COARSE = {"bf16": {"rtol": 2e-3, "atol": 2e-3}}
"""Its numbers have 8 bits."""

# What processes do not learn as one does.
OF_THEIR_OWN = ("normalized", "dropped")


def sgd(**options):
    return keras.optimizers.SGD(0.5, **options)


def make_scale(**options):
    return keras.optimizers.LossScaleOptimizer(sgd(**options))


def learn(backend, case, rank=0):
    """Train a model; what it has, by name, and the history."""
    make, data, options = CASES[case]
    options = {"loss": "cross_entropy", "metrics": ["accuracy"], **options}
    if options["loss"] is None:
        del options["loss"], options["metrics"]
    if callable(options.get("optimizer")):
        options["optimizer"] = options["optimizer"]()
    keras.utils.set_random_seed(rank)
    num_gpus = 1 - list(CASES).index(case) % 2
    with backend.strict() if num_gpus else nullcontext():
        return train(backend, make, data(), num_gpus, **options)


def learn_all(folder):
    """Train all models in a process of a launch, and keep what they have learned."""
    import d2ldev

    backend, rank = d2ldev.get_backend("tensorflow"), int(os.environ["RANK"])
    known = {"devices": [str(device) for device in backend.devices()]}
    known["placed"] = str(backend.device_of(backend.zeros(3, device="gpu:0")))
    known["strategy"] = tf.distribute.has_strategy()
    (folder / f"known-{rank}.json").write_text(json.dumps(known))
    for case in CASES:
        values, history = learn(backend, case, rank)
        np.savez(folder / f"{case}-{rank}.npz", **values)
        (folder / f"{case}-{rank}.json").write_text(json.dumps(history))


@pytest.fixture(
    scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def size(request):
    """How many processes train."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, size):
    """What several processes have learned."""
    folder = tmp_path_factory.mktemp("processes")
    here = Path(__file__).parent
    helpers = here.parents[2] / "helpers"
    program = folder / "program.py"
    program.write_text(
        f"import pathlib, sys, warnings\n"
        f"warnings.simplefilter('ignore')\n"
        f"sys.path += [{str(here)!r}, {str(helpers)!r}]\n"
        f"from test_tensorflow_processes import learn_all\n"
        f"learn_all(pathlib.Path({str(folder)!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "d2ldev", "launch", "--processes", str(size), str(program)],
        env={**os.environ, "D2LDEV_VIRTUAL_GPUS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def read_learned(folder, case, rank=0):
    with np.load(folder / f"{case}-{rank}.npz") as values:
        history = json.loads((folder / f"{case}-{rank}.json").read_text())
        return dict(values), history


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")  # as Keras says of it
@pytest.mark.parametrize("case", [case for case in CASES if case not in OF_THEIR_OWN])
def test_several_processes_learn_like_one(backend, folder, case):
    (values, history), (expected, curves) = read_learned(folder, case), learn(backend, case)
    tolerance = _COARSE.get(case, TOLERANCE)
    assert len(values) == len(expected)
    for value, wanted in zip(values.values(), expected.values(), strict=True):
        np.testing.assert_allclose(value, wanted, **tolerance)
    assert list(history) == list(curves)
    for name, curve in curves.items():
        np.testing.assert_allclose(history[name], curve, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_all_processes_end_with_the_same(folder, size, case):
    values = read_learned(folder, case)[0]
    for rank in range(1, size):
        others = read_learned(folder, case, rank)[0]
        assert len(values) == len(others)
        for value, other in zip(values.values(), others.values(), strict=True):
            np.testing.assert_array_equal(value, other)


def test_statistics_are_those_of_the_first_process(folder, size):
    values, _ = read_learned(folder, "normalized")
    (mean,) = (value for name, value in values.items() if "moving_mean" in name)
    expected = np.zeros(FEATURES)
    for x, _ in 2 * even():
        expected = (expected + x[: -(-len(x) // size)].mean(0)) / 2
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


def test_each_process_has_masks_of_its_own(folder):
    values, _ = read_learned(folder, "dropped")
    (weight,) = (value for value in values.values() if value.shape == (32, 2))
    assert ((weight[:, 0] != 0) != (weight[:, 1] != 0)).any()
    assert not weight.all()


def test_a_process_has_its_own_devices_alone(folder, size):
    for rank in range(size):
        known = json.loads((folder / f"known-{rank}.json").read_text())
        assert known["devices"] == ["cpu", "gpu:0"]
        assert known["placed"] == "gpu:0"
        assert not known["strategy"]


def test_a_process_joins_before_tensorflow_begins(backend):
    group = SimpleNamespace(size=2)
    with pytest.raises(UnsupportedValueError, match="TensorFlow has started already"):
        framework_of(backend).parallel.join(group)


# -- engines and launches of TensorFlow's own ------------------------------------------------------


def tf_config(**numbers):
    """Return what a launcher says of so many tasks of each type."""
    cluster = {name: [f"host{i}:2222" for i in range(n)] for name, n in numbers.items()}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})


def fit_one(backend):
    return Trainer(1, num_gpus=0, backend=backend).fit(dense(), even(), loss="cross_entropy")


@pytest.mark.parametrize(
    "value",
    [
        tf_config(worker=2),
        tf_config(chief=1, worker=1),
        "no JSON",
        "3",
        '{"cluster": 3}',
        '{"cluster": {"worker": 3}}',
    ],
)
def test_a_task_that_may_be_of_several_is_refused(backend, monkeypatch, value):
    monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(UnsupportedValueError, match=r"by TF_CONFIG this .* RANK and") as caught:
        fit_one(backend)
    assert "or leave TF_CONFIG out, for a model" in caught.value.fix


@pytest.mark.parametrize(
    "value", ["", "{}", tf_config(worker=1), tf_config(chief=1, evaluator=1), tf_config(ps=2)]
)
def test_a_task_of_its_own_trains(backend, monkeypatch, value):
    monkeypatch.setenv("TF_CONFIG", value)
    assert len(fit_one(backend)["loss"]) == 1


OWN_ENGINE = """
import os, sys
how, *addresses = sys.argv[1:]
rank = int(os.environ["RANK"])
if how == "alone":
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
import tensorflow as tf
if how != "none":
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}), "", "worker", rank, rpc_layer="grpc"
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
import d2ldev
try:
    backend = d2ldev.get_backend("tensorflow")
    batch = backend.ones((2, 3)), backend.ones((2, 1))
    trainer = d2ldev.Trainer(1, num_gpus=0, backend=backend)
    print(trainer.fit(backend.mlp([3, 1], seed=0), [batch])["loss"])
except d2ldev.errors.D2LDevError as error:
    print(error)  # the later process's quotes that of the other one
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("alone", "RANK and WORLD_SIZE are not set"),
        ("launched", "has made a MultiWorkerMirroredStrategy"),
    ],
)
def test_a_strategy_that_the_program_has_made_between_processes_is_refused(how, said):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    done = run_processes(OWN_ENGINE, how, *addresses, timeout=30, environment=WITHOUT_GPUS)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert all(said in each.stdout for each in done), done


def test_a_launch_goes_before_that_of_tensorflow():
    environment = {**WITHOUT_GPUS, "TF_CONFIG": tf_config(worker=2)}
    done = run_processes(OWN_ENGINE, "none", timeout=30, environment=environment)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert done[0].stdout.startswith("[0.")
