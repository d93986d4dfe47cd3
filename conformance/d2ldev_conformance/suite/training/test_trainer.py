"""D2L 6.7.3: the model moves once, each batch at the boundary, and nothing inside the loop.

The model moves once, and each batch moves at the boundary. Nothing inside the loop moves, and the
device does not change the result.
"""

from __future__ import annotations

import numpy as np
import pytest

import d2ldev
from d2ldev import DeviceUnavailableError, Trainer, WeightedLoss
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.provision import models_with_masks
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_values, needs_float32, values_of

SECTION = "6.7.3"
SOURCE = "contract, Training"
EPOCHS = 3
TRANSFERS = ("transfer", "from_data", "to_numpy")


class Watched(tuple):
    """A batch that is asked for its children as often as it is walked."""


def _fit(backend, batches, num_gpus, **options):
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    return trainer, trainer.fit(backend.mlp([2, 1]), batches, lr=0.1, **options)


@requirement("fit.learns", section=SECTION, source="D2L")
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_the_loss_falls_with_every_optimizer(backend, batches, num_gpus, optimizer):
    """Reduce the loss with each named optimizer."""
    _, history = _fit(backend, batches, num_gpus, optimizer=optimizer)
    assert len(history["loss"]) == EPOCHS
    assert all(type(loss) is float for loss in history["loss"])
    assert history["loss"][-1] < history["loss"][0]


@requirement("fit.learning-rate-in-history", section=SECTION)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_history_has_the_learning_rate_of_each_epoch(
    backend, batches, num_gpus, optimizer, tmp_path
):
    """Keep the learning rate of each epoch in the history, also of a resumed run.

    A curve that bends is read together with the rate.
    """
    for epochs in (1, EPOCHS):
        trainer = Trainer(epochs, num_gpus, backend=backend)
        options = {"optimizer": optimizer, "checkpoint": tmp_path / "run", "resume": True}
        history = trainer.fit(backend.mlp([2, 1]), batches, lr=0.125, **options)
        assert list(history) == ["loss", "lr"]
        assert history["lr"] == [0.125] * epochs


@requirement("fit.classifies", section=SECTION)
def test_a_model_learns_classes(backend, num_gpus):
    """Learn two classes, and measure the accuracy."""
    inputs = np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1]], "float32")
    labels = np.array([0, 1, 0, 1], "int32")
    trainer = Trainer(20, num_gpus, backend=backend)
    history = trainer.fit(
        backend.mlp([2, 2]), [(inputs, labels)], loss="cross_entropy", lr=1.0, metrics=["accuracy"]
    )
    assert history["accuracy"][-1] == 1.0
    assert history["loss"][-1] < history["loss"][0]


@requirement("fit.takes-numbers-of-numpy", section=SECTION)
@pytest.mark.parametrize("lr", [np.float32(0.125), np.float64(0.125)], ids=["float32", "float64"])
def test_a_learning_rate_may_be_a_number_of_numpy(backend, batches, num_gpus, lr, tmp_path):
    """Accept a learning rate that is a number of NumPy, and save it.

    Sweeps take rates from ``np.logspace``.
    """

    def fit(lr):
        trainer = Trainer(EPOCHS, num_gpus, backend=backend)
        path = tmp_path / type(lr).__name__
        return trainer.fit(backend.mlp([2, 1]), batches, lr=lr, checkpoint=path)

    assert fit(lr) == fit(0.125)


@requirement("fit.on-the-device", section=SECTION, source="D2L")
def test_everything_lives_on_the_trainers_device(backend, batches, num_gpus):
    """Keep model and batches on the trainer's device for the whole run."""
    where, place = [], backend.gpu(0) if num_gpus else backend.cpu()

    class Watching(Trainer):
        def prepare_batch(self, batch):
            batch = super().prepare_batch(batch)
            where.extend(backend.device_of(x) for x in batch)
            return batch

    trainer = Watching(EPOCHS, num_gpus, backend=backend)
    with backend.strict():
        trainer.fit(backend.mlp([2, 1]), batches)
    assert trainer.gpus == ([place] if num_gpus else [])
    assert set(where) == {place}
    assert set(backend.placement(trainer.model).values()) == {place}


@requirement("fit.same-curve", section=SECTION)
def test_the_curve_is_that_of_the_cpu(backend, batches, num_gpus):
    """Train on each device with the losses of the CPU, to rounding.

    A training must not depend on where it happens.
    """
    _, on_the_cpu = _fit(backend, batches, 0)
    _, history = _fit(backend, batches, num_gpus)
    # Devices add in other orders, and a few steps multiply the difference.
    np.testing.assert_allclose(history["loss"], on_the_cpu["loss"], rtol=1e-4)


@requirement("fit.means-over-examples", section=SECTION)
def test_a_smaller_last_batch_counts_for_as_many_examples(backend, batches, num_gpus):
    """Report the mean over the examples, also with a smaller last batch.

    A mean over batches weighs the last one too much.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    net = backend.mlp([2, 1])
    predictions = [backend.to_numpy(net(backend.asarray(X))) for X, _ in batches]
    errors = np.concatenate([p - y for p, (_, y) in zip(predictions, batches, strict=True)])
    # Without learning, so that every batch is compared with the same model.
    history = trainer.fit(net, batches, batches, lr=0.0)
    np.testing.assert_allclose(history["loss"], [np.mean(errors**2)], rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], [np.mean(errors**2)], rtol=1e-5)


@requirement("fit.walks-a-batch-once", section=SECTION)
def test_a_batch_is_taken_apart_once(backend, batches, num_gpus):
    """Take each batch apart once.

    A walk in Python costs time in each step.
    """
    walks = []
    children = lambda batch: walks.append(batch) or list(batch)  # noqa: E731
    d2ldev.register_container(Watched, children, lambda _, new: Watched(new))
    watched = [Watched(batch) for batch in batches]
    Trainer(1, num_gpus, backend=backend).fit(backend.mlp([2, 1]), watched, watched)
    assert len(walks) == 2 * len(batches)


@requirement("fit.moves-batches-only", section=SECTION, source="D2L")
def test_in_the_loop_nothing_is_moved_but_the_batches(backend, batches, num_gpus, monkeypatch):
    """Move nothing but the batches in an epoch, and read one tensor at its end."""
    native_batches = [tuple(backend.asarray(array) for array in batch) for batch in batches]
    moved, depth = [], []
    framework = framework_of(backend)
    for room, names in ((framework.tensors, TRANSFERS), (framework.models, ("find_refill",))):
        for name in names:
            monkeypatch.setattr(room, name, _count_calls(moved, depth, getattr(room, name)))
    counts = {}

    class Counting(Trainer):
        def on_epoch_end(self, epoch, history):
            counts[epoch] = len(moved)

    with backend.strict():
        trainer = Counting(EPOCHS, num_gpus, backend=backend)
        trainer.fit(backend.mlp([2, 1]), native_batches)
    # The methods that move a batch, in as many calls as the framework needs, and one for the log.
    first = moved[counts[0] : counts[1]]
    assert first.count("to_numpy") == 1
    assert len(first) - 1 <= 2 * len(batches) * num_gpus
    assert counts[2] - counts[1] == counts[1] - counts[0]


def _count_calls(moved, depth, method):
    """Return a method that notes its name when it is called, but not inside such a method."""

    def count(*args, **options):
        if not depth:
            moved.append(method.__name__)
        depth.append(method)
        try:
            return method(*args, **options)
        finally:
            depth.pop()

    return count


@requirement("fit.places-the-model-once", section=SECTION, source="D2L")
def test_the_model_is_moved_once(backend, batches, num_gpus, monkeypatch):
    """Place the model once in a run."""
    placed = []
    place_it = backend.place
    net = backend.mlp([2, 1])

    def place(obj, device):
        placed.append(obj is net)
        return place_it(obj, device)

    monkeypatch.setattr(backend, "place", place)
    Trainer(EPOCHS, num_gpus, backend=backend).fit(net, batches)
    assert placed.count(True) == 1


@requirement("fit.clips-gradients", section=SECTION, source="PyTorch, clip_grad_norm_")
@needs_float32
def test_the_norm_of_a_step_is_no_larger_than_the_clip(backend, batches, num_gpus):
    """Clip the norm of all gradients together."""
    net = backend.mlp([2, 1])
    before = _parameters(backend, net, "cpu")
    trainer = Trainer(1, num_gpus, gradient_clip_val=0.5, backend=backend)
    trainer.fit(net, [(X, 1000 * y) for X, y in batches[:1]], lr=1.0)
    after = _parameters(backend, trainer.model, trainer.device)
    np.testing.assert_allclose(np.linalg.norm(after - before), 0.5, rtol=1e-4)


def _parameters(backend, line, device):
    """Return a line's bias and weights, found by their values: a model may keep gradients."""
    points = backend.asarray(np.array([[0, 0], [1, 0], [0, 1]], "float32"), device=device)
    values = backend.to_numpy(line(points))[:, 0]
    return np.array([values[0], *(values[1:] - values[0])])


@requirement("fit.evaluation-changes-nothing", section=SECTION)
def test_evaluation_changes_no_parameter(backend, batches, num_gpus):
    """Train the same parameters with and without an evaluation.

    A look at a model must not change it.
    """
    plain, _ = _fit(backend, batches, num_gpus)
    evaluated, history = _fit(backend, batches, num_gpus, val_data=batches)
    assert len(history["val_loss"]) == EPOCHS
    assert_same_values(backend, evaluated.model, values_of(backend, plain.model))


@requirement("fit.takes-its-own-and-foreign-arrays", section=SECTION)
def test_tensors_lists_and_dicts_give_the_same_as_numpy(backend, batches, num_gpus):
    """Train on tensors, lists and dicts as on NumPy arrays.

    Loaders return all of them.
    """
    _, expected = _fit(backend, batches, num_gpus)
    native = [[backend.asarray(array) for array in batch] for batch in batches]
    named = [{"X": X, "y": y} for X, y in batches]
    assert _fit(backend, native, num_gpus)[1] == expected
    assert _fit(backend, named, num_gpus)[1] == expected


@requirement("fit.inputs-by-name", section=SECTION)
@pytest.mark.parametrize("names", [("mask", "x", "y"), ("y", "x", "mask")], ids="-".join)
def test_a_dict_passes_inputs_by_name(backend, num_gpus, masked_model, names):
    """Pass the entries of a dict to the model by name, in any order.

    Position would swap a mask and an input.
    """
    draw = np.random.default_rng(0)
    arrays = {name: draw.random((8, 3), "float32") for name in ("x", "mask", "y")}
    batch = {name: arrays[name] for name in names}
    trainer = Trainer(1, num_gpus, backend=backend)
    net = models_with_masks(backend)[masked_model](trainer.device)
    # Without learning, so that the model predicts afterwards what it did before.
    history = trainer.fit(net, [batch], [batch], lr=0.0)
    inputs = [backend.asarray(arrays[name], device=trainer.device) for name in ("x", "mask")]
    prediction = backend.to_numpy(trainer.model(*inputs))
    expected = [np.mean((prediction - arrays["y"]) ** 2)]
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], expected, rtol=1e-5)


@requirement("fit.weighs-examples", section=SECTION)
def test_the_sample_weight_of_a_dict_weighs_its_examples(backend, batches, num_gpus):
    """Weigh examples by ``sample_weight`` as if they were repeated.

    Rare classes get more weight.
    """
    weights = np.array([1, 0, 2, 1], "float32")
    weighted = [{"x": X, "y": y, "sample_weight": weights[: len(y)]} for X, y in batches]
    repeated = [
        tuple(array.repeat(weights[: len(y)].astype(int), axis=0) for array in (X, y))
        for X, y in batches
    ]

    def count(_prediction, y):
        return 1.0 * y.shape[0]

    options = {"val_data": weighted[:1], "metrics": [count]}
    found, history = _fit(backend, weighted, num_gpus, **options)
    expected, _ = _fit(backend, repeated, num_gpus)
    assert history["val_count"] == [4.0] * EPOCHS
    np.testing.assert_allclose(
        *(_parameters(backend, trainer.model, trainer.device) for trainer in (found, expected)),
        rtol=1e-5,
    )


def _weigh(prediction, y):
    """Return squares, each with the weight in the second column of the target."""
    rows = range(y.shape[0])
    squares = [(prediction[i, 0] - y[i, 0]) ** 2 * y[i, 1] for i in rows]
    return WeightedLoss(sum(squares), sum(y[i, 1] for i in rows))


@requirement("fit.weighs-the-loss-of-an-epoch", section=SECTION)
@pytest.mark.parametrize(
    "kind",
    [
        *("labels", "weights", "uneven"),
        pytest.param("own", marks=pytest.mark.needs("train", "train with a loss of your own")),
    ],
)
def test_the_loss_of_an_epoch_is_that_of_one_batch_of_all(backend, num_gpus, kind):
    """Give an epoch of several batches the loss of one batch of all, to train and to validate.

    A batch of two labels must not count like a batch of twenty.
    """
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((12, 2)).astype("float32"), np.arange(12, dtype="int32") % 3
    weights = np.array([1, 2, 0, 0, 0, 0, 3, 0, 0, 0.5, 0, 1], "float32")
    loss = _weigh if kind == "own" else "cross_entropy"
    batch = {"x": x, "y": y}
    if kind == "labels":
        batch["y"] = np.where(weights == 0, -100, y).astype("int32")
    elif kind == "weights":
        batch["sample_weight"] = weights
    elif kind == "own":
        batch["y"] = np.stack([y, weights], 1).astype("float32")
    data = [
        {name: array[part] for name, array in batch.items()}
        for part in (slice(5), slice(5, 6), slice(6, 12))
    ]
    histories = []
    for batches in (data, [batch]):
        trainer = Trainer(1, num_gpus, backend=backend)
        net = backend.mlp([2, 3])
        histories.append(trainer.fit(net, batches, batches, loss=loss, lr=0.0))
    found, expected = histories
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


@requirement("fit.weights-of-zero", section=SECTION)
@pytest.mark.parametrize("loss", ["mse", "bce", "cross_entropy"])
def test_a_batch_whose_weights_are_all_0_changes_nothing(backend, num_gpus, loss):
    """Change nothing in a batch whose weights are all 0.

    A mean over nothing is NaN, which spreads to all parameters.
    """
    labels = np.array([0, 1, 1], "int32")
    y = labels if loss == "cross_entropy" else np.eye(2, dtype="float32")[labels]
    batch = {"x": np.ones((3, 2), "float32"), "y": y, "sample_weight": np.zeros(3, "float32")}
    net = backend.mlp([2, 2])
    trainer = Trainer(2, num_gpus, backend=backend)
    before = backend.to_numpy(net(backend.asarray(batch["x"])))
    history = trainer.fit(net, [batch], [batch], loss=loss, lr=0.1)
    assert history == {"loss": [0.0, 0.0], "val_loss": [0.0, 0.0], "lr": [0.1, 0.1]}
    after = trainer.model(backend.asarray(batch["x"], device=trainer.device))
    np.testing.assert_allclose(backend.to_numpy(after), before, rtol=1e-6)


@requirement("fit.resumes", section=SECTION, source="contract, Resuming a run")
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    backend, batches, num_gpus, optimizer, tmp_path
):
    """End a resumed run like an unbroken one, with each optimizer."""
    options = {"optimizer": optimizer, "lr": 0.1}
    unbroken = Trainer(4, num_gpus, backend=backend)
    expected = unbroken.fit(backend.mlp([2, 4, 1]), batches, **options)
    path = tmp_path / "run.safetensors"
    Trainer(2, num_gpus, backend=backend).fit(
        backend.mlp([2, 4, 1]), batches, checkpoint=path, **options
    )
    resumed = Trainer(4, num_gpus, backend=backend)
    history = resumed.fit(
        backend.mlp([2, 4, 1], seed=9), batches, checkpoint=path, resume=True, **options
    )
    assert history == expected
    assert_same_values(backend, resumed.model, values_of(backend, unbroken.model))


class Drawing:
    """Batches that note where tensors are made while they are drawn."""

    def __init__(self, backend, batches):
        self._backend, self._batches, self.places = backend, batches, set()

    def __iter__(self):
        for batch in self._batches:
            self._note()
            yield batch
        self._note()

    def _note(self):
        x = self._backend.zeros(1)
        self.places |= {self._backend.device_of(x), self._backend.default_device()}


@requirement("fit.draws-outside-of-a-block", section=SECTION)
@pytest.mark.parametrize("call", ["fit", "saved", "validate", "predict", "prefetch"])
@pytest.mark.needs_gpus(1)
def test_batches_are_drawn_outside_of_a_block(backend, batches, num_gpus, call, tmp_path):
    """Draw batches outside of d2ldev's own device blocks.

    A loader's tensors must not land on the GPU.
    """
    data, trainer = Drawing(backend, batches), Trainer(2, num_gpus, backend=backend)
    net = backend.mlp([2, 1])
    with backend.on("gpu:0") as place:
        if call == "prefetch":
            assert len(list(backend.prefetch(data, "gpu:0"))) == len(batches)
        elif call in ("fit", "saved"):
            every = (
                {"checkpoint": tmp_path / "run", "checkpoint_every": 2} if call == "saved" else {}
            )
            trainer.fit(net, data, data, **every)
        else:
            getattr(trainer, call)(net, data)
        assert backend.device_of(backend.zeros(1)) == place
    assert data.places == {backend.cpu()}


@requirement("fit.accumulates", section=SECTION)
def test_the_last_step_of_an_epoch_has_the_batches_that_are_left(backend, batches, num_gpus):
    """Make the last step of an epoch from the batches that are left.

    Otherwise the last examples of each epoch are lost.
    """
    batches = batches[:3]  # of one size
    accumulated = Trainer(EPOCHS, num_gpus, accumulate_grad_batches=2, backend=backend)
    accumulated.fit(backend.mlp([2, 1]), batches, lr=0.1)
    together = Trainer(EPOCHS, num_gpus, backend=backend)
    joined = tuple(np.concatenate(both) for both in zip(*batches[:2], strict=True))
    together.fit(backend.mlp([2, 1]), [joined, batches[2]], lr=0.1)
    found, expected = (
        _parameters(backend, trainer.model, trainer.device) for trainer in (accumulated, together)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@requirement("fit.resumes-accumulated", section=SECTION, source="contract, Resuming a run")
def test_a_resumed_run_accumulates_like_an_uninterrupted_one(backend, batches, num_gpus, tmp_path):
    """End a resumed run that accumulates gradients like an unbroken one.

    The count of batches is a part of the state.
    """

    def fit(epochs, **options):
        trainer = Trainer(epochs, num_gpus, accumulate_grad_batches=3, backend=backend)
        history = trainer.fit(backend.mlp([2, 4, 1]), batches, optimizer="adam", **options)
        return trainer.model, history

    path = tmp_path / "run.safetensors"
    fit(2, checkpoint=path)
    resumed, history = fit(4, checkpoint=path, resume=True)
    unbroken, expected = fit(4)
    assert history == expected
    assert_same_values(backend, resumed, values_of(backend, unbroken))


@requirement("fit.resumes-in-fewer-bits", section=SECTION, source="contract, Resuming a run")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_resumed_run_in_fewer_bits_ends_like_an_uninterrupted_one(
    backend, batches, num_gpus, precision, tmp_path
):
    """End a resumed run in bf16 or fp16 like an unbroken one.

    The scale of the gradients is a part of the state.
    """
    # In the first half of the run, gradients are still too large for float16.
    large = [(X, 1000 * y) for X, y in batches]

    def fit(epochs, **options):
        trainer = Trainer(epochs, num_gpus, precision=precision, backend=backend)
        history = trainer.fit(backend.mlp([2, 4, 1]), large, optimizer="adam", **options)
        return trainer.model, history

    path = tmp_path / "run.safetensors"
    fit(2, checkpoint=path)
    resumed, history = fit(4, checkpoint=path, resume=True)
    unbroken, expected = fit(4)
    assert history == expected
    assert history["loss"][-1] < history["loss"][0]
    assert_same_values(backend, resumed, values_of(backend, unbroken))


@requirement("fit.too-many-gpus", section=SECTION, source="contract, Several GPUs")
def test_more_gpus_than_there_are_is_an_error_that_says_how_many(backend):
    """Refuse more GPUs than there are, and say how many there are.

    Fewer GPUs would train another batch size.
    """
    count = backend.num_gpus()
    with pytest.raises(DeviceUnavailableError, match=f"has {count} GPU"):
        Trainer(1, count + 1, backend=backend)
