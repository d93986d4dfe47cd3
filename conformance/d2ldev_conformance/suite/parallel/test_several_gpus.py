"""D2L 13.6: several GPUs train one model, and learn what one of them learns.

More GPUs are for speed. The numbers of a training have to stay those of one GPU, to rounding.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import (
    Broadcast,
    EpochMetric,
    Trainer,
    UnsupportedValueError,
    WeightedLoss,
    get_backend,
)
from d2ldev.results import History
from d2ldev_conformance.provision import (
    attention_models,
    models_with_losses,
    models_with_tables,
    networks,
    networks_with_batch_norm,
)
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import (
    ROUNDING,
    assert_near,
    assert_same_run,
    assert_same_statistics,
    make_normal_batches,
    make_repeated_tokens,
    needs_float32,
    read_saved_values,
)
from d2ldev_conformance.suite.training.steps.test_training_steps import WithReduction
from d2ldev_conformance.suite.training.test_metrics import (
    Errors,
    ErrorsOfKeras,
    check_root,
    take_root,
)
from d2ldev_conformance.suite.training.test_stopping import (
    AfterStep,
    HookError,
    RaisingAfterEpoch,
    RaisingAfterStep,
)

SECTION = "13.6"
SOURCE = "D2L"

pytestmark = [
    pytest.mark.needs_gpus(2),
    pytest.mark.usefixtures("copied_processes"),
    pytest.mark.starts_processes,
]


def _data(examples=14, batch_size=5):
    """Return batches of three classes, which two GPUs cannot share evenly."""
    inputs = np.linspace(-1, 1, 3 * examples, dtype="float32").reshape(examples, 3)[:, ::-1] ** 3
    labels = (np.arange(examples) % 3).astype("int32")
    return [
        (inputs[i : i + batch_size], labels[i : i + batch_size])
        for i in range(0, examples, batch_size)
    ]


def _fit(backend, num_gpus, data=None, epochs=3, clip=0, accumulate_grad_batches=1, **options):
    backend.seed(0)
    net = backend.mlp([3, 8, 3])
    trainer = Trainer(
        epochs,
        num_gpus,
        clip,
        backend=backend,
        accumulate_grad_batches=accumulate_grad_batches,
    )
    options = {"loss": "cross_entropy", "lr": 0.1, "metrics": ["accuracy"], **options}
    history = trainer.fit(net, _data() if data is None else data, **options)
    return read_saved_values(backend, trainer.model), history, trainer


@requirement("several.learn-what-one-learns", section=SECTION)
@needs_float32
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_two_gpus_learn_like_one_gpu(backend, optimizer):
    """Train on two GPUs the parameters and the history of one."""
    options = {"optimizer": optimizer, "lr": 0.02, "val_data": _data(7, 3)}
    assert_same_run(_fit(backend, 2, **options), _fit(backend, 1, **options))


@requirement("several.learn-what-one-learns", section=SECTION)
@needs_float32
@pytest.mark.parametrize(
    ("number", "optimizer"),
    [
        pytest.param(number, optimizer, marks=pytest.mark.needs_gpus(number))
        for number, optimizer in ((3, "momentum"), (4, "adam"))
    ],
)
def test_three_and_four_gpus_learn_like_one_gpu(backend, number, optimizer):
    """Train on three and four GPUs the parameters of one, with clipped gradients.

    Three GPUs never share a batch evenly.
    """
    options = {"optimizer": optimizer, "lr": 0.02, "clip": 0.1}
    assert_same_run(_fit(backend, number, **options), _fit(backend, 1, **options))


@requirement("several.measure-whole-epochs", section=SECTION, source="contract, Metrics")
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.needs_gpus(3))])
def test_a_metric_has_the_examples_of_all_gpus(backend, number):
    """Give a metric the predictions of all GPUs, in their order.

    The last batch has one example, and a GPU has none of it.
    """
    inputs = np.linspace(-1, 1, 33, dtype="float32").reshape(11, 3)
    data = [(inputs[i : i + 5], 100 + 50 * inputs[i : i + 5, :1]) for i in range(0, 11, 5)]
    backend.seed(0)
    metrics = {"own": Errors(), "keras": ErrorsOfKeras(), "whole": EpochMetric(take_root)}
    history = Trainer(2, number, backend=backend).fit(
        backend.mlp([3, 1]), data, data[1:], lr=1e-4, metrics=metrics
    )
    for name in metrics:
        check_root(history, name)


@requirement("several.change-the-parameters", section=SECTION)
def test_two_gpus_learn(backend):
    """Reduce the loss on two GPUs.

    Two models that both stay as they are agree, too.
    """
    _, history, trainer = _fit(backend, 2, optimizer="adam")
    assert history["loss"][-1] < history["loss"][0]
    assert type(history) is type(trainer.history) is History  # also from other processes


SHARD = 37
"""The examples of a shard, a number that the suite gives no other tensors."""


class Looking:
    """A mean of squares that notes which GPUs have a shard of the batch while it is computed.

    Args:
        name: the backend.
        folder: where to note it: there may be a process for each GPU.
    """

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def __call__(self, prediction, y):
        for x in get_backend(self.name).live_tensors():
            if SHARD in x.shape:
                (self.folder / f"{x.device.kind}-{x.device.index}").touch()
        rows = range(y.shape[0])
        return sum((prediction[i, 0] - y[i, 0]) ** 2 for i in rows) / len(rows)


@requirement("several.use-each-gpu", section=SECTION, source="contract, Several GPUs")
def test_each_gpu_has_a_shard_of_the_batch_in_a_step(backend, tmp_path):
    """Give each GPU a shard of the batch in a step.

    If a GPU is left out, the numbers are the same, and the step takes as long as on one. The shards
    are there when the loss is called, or traced.
    """
    x = np.linspace(-1, 1, 4 * SHARD, dtype="float32").reshape(2 * SHARD, 2)
    loss = Looking(backend.name, tmp_path)
    Trainer(1, 2, backend=backend).fit(backend.mlp([2, 1]), [(x, x[:, :1])], loss=loss)
    assert {path.name for path in tmp_path.iterdir()} >= {"gpu-0", "gpu-1"}


@requirement("several.clip-the-whole-gradient", section=SECTION, source="PyTorch, clip_grad_norm_")
def test_the_gradient_of_the_whole_batch_is_clipped(backend):
    """Clip the gradient of the whole batch.

    The norms of the parts are not the norm of the sum.
    """
    assert_same_run(_fit(backend, 2, clip=0.05), _fit(backend, 1, clip=0.05))


@requirement("several.accumulate", section=SECTION, source="contract, Training")
def test_gradients_of_several_batches_make_a_step(backend):
    """Make a step from several batches on two GPUs as on one."""
    assert_same_run(
        _fit(backend, 2, accumulate_grad_batches=3, clip=0.05),
        _fit(backend, 1, accumulate_grad_batches=3, clip=0.05),
    )


def _take_weighted(prediction, y):
    """Return squares, each with the weight in the second column of the target."""
    rows = range(y.shape[0])
    squares = [(prediction[i, 0] - y[i, 0]) ** 2 * y[i, 1] for i in rows]
    return WeightedLoss(sum(squares), sum(y[i, 1] for i in rows))


@requirement("several.refuse-sums", section=SECTION, source="contract, Training")
@pytest.mark.needs("train", "train with a loss of your own")
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_loss_that_is_no_mean_is_refused_on_two_gpus(backend, reduction):
    """Refuse on two GPUs a loss whose ``reduction`` differs from a mean.

    The sums of the shards would be averaged, and the step would depend on the number of GPUs.
    """
    with pytest.raises(UnsupportedValueError, match=reduction):
        backend.learner(
            backend.mlp([2, 1], device="gpu:0"),
            loss=WithReduction(reduction),
            devices=["gpu:0", "gpu:1"],
        )


@requirement("several.accumulate-by-weight", section=SECTION, source="contract, Training")
@pytest.mark.parametrize("accumulate_grad_batches", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        "labels",
        "weights",
        pytest.param("own", marks=pytest.mark.needs("train", "train with a loss of your own")),
    ],
)
def test_batches_and_shards_count_by_the_weights_of_their_losses(
    backend, kind, accumulate_grad_batches
):
    """Count batches and shards on two GPUs by the weights of their losses.

    A shard may have no weight at all, and a loss of the user's may tell its weight.
    """
    data, options = [], {"accumulate_grad_batches": accumulate_grad_batches, "clip": 0.05}
    for number, (x, y) in enumerate(_data()):
        weights = np.arange(len(y), dtype="float32") * (number != 1)
        weights[: 3 * (number == 0)] = 0
        if kind == "labels":
            data.append((x, np.where(weights == 0, -100, y).astype("int32")))
        elif kind == "weights":
            data.append({"x": x, "y": y, "sample_weight": weights})
        else:
            data.append((x, np.stack([y, weights], 1).astype("float32")))
    if kind == "own":
        options |= {"loss": _take_weighted, "metrics": ()}
    options |= {"val_data": data}
    assert_same_run(_fit(backend, 2, data, **options), _fit(backend, 1, data, **options))


@requirement("several.take-small-batches", section=SECTION)
def test_a_batch_may_have_fewer_examples_than_there_are_gpus(backend):
    """Train on a batch with fewer examples than GPUs.

    The last batch of an epoch may have one example.
    """
    data = _data(6)  # the last one has one example
    assert_same_run(_fit(backend, 2, data), _fit(backend, 1, data))


@requirement("several.weigh-the-whole-batch", section=SECTION, source="contract, Several GPUs")
@pytest.mark.parametrize(
    "weights",
    [[1, 3, 0.5, 2, 1], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0]],
    ids=["all", "half", "none"],
)
def test_weights_are_those_of_the_whole_batch(backend, weights):
    """Weigh examples within the whole batch, and not within each part.

    A part may have no weight at all.
    """
    (x, y), *_ = _data()
    inputs = {"x": x, "sample_weight": np.array(weights, "float32")}
    for data in ([{**inputs, "y": y}], [(inputs, y)]):
        assert_same_run(_fit(backend, 2, data), _fit(backend, 1, data))


@requirement("several.loss-of-the-model", section=SECTION, source="contract, Several GPUs")
def test_shards_with_a_loss_of_the_model_count_by_their_examples(backend, loss_model):
    """Weigh the loss that a model computes for each shard by the examples of the shard.

    Then a mean over examples is the mean over the batch, also if the shards differ in size.
    """
    data = [{"labels": y % 2, "z": None, "x": X} for X, y in _data()]
    found = []
    for number in (2, 1):
        trainer = Trainer(3, number, backend=backend)
        net = models_with_losses(backend)[loss_model](backend.cpu())
        history = trainer.fit(net, data, data, loss="model", lr=0.1, metrics=["accuracy"])
        found.append((read_saved_values(backend, trainer.model), history, trainer))
    assert_same_run(*found)


@requirement("several.add-up-repeated-rows", section=SECTION, source="contract, Several GPUs")
@needs_float32
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_a_token_that_repeats_in_all_shards_has_one_gradient(backend, table, optimizer):
    """Take the rows of a token that repeats, in one shard or in several, for one gradient."""
    found = []
    for number, data in zip((1, 2), make_repeated_tokens(), strict=True):
        net = models_with_tables(backend)[table](backend.cpu())
        trainer = Trainer(2, number, 0.05, backend=backend)
        trainer.fit(net, data, loss="mse", optimizer=optimizer, lr=0.1)
        found.append(read_saved_values(backend, trainer.model))
    assert_near(*found)


@requirement(
    "several.normalize-more-than-one-example", section=SECTION, source="contract, Several GPUs"
)
def test_no_gpu_normalizes_a_part_of_one_example(backend, normalized_network):
    """Give no GPU a single example to normalize.

    The variance of one example is 0.
    """
    inputs = np.random.default_rng(0).normal(3, 2, (3, 4)).astype("float32")
    data, losses = [(inputs, np.array([0, 1, 0], "int32"))], []
    for number in (1, 2):
        backend.seed(0)
        net = networks_with_batch_norm(backend)[normalized_network](backend.cpu())
        trainer = Trainer(2, number, backend=backend)
        losses.append(trainer.fit(net, data, loss="cross_entropy", lr=0.1)["loss"])
    # One of two GPUs has all three examples.
    np.testing.assert_allclose(losses[1], losses[0], **ROUNDING)


@requirement("several.keep-running-statistics", section=SECTION, source="contract, Several GPUs")
def test_the_model_has_the_running_statistics_of_two_gpus(backend, normalized_network):
    """Give the model the running statistics of a training on two GPUs.

    Each GPU normalizes with a copy of the model. Here all shards of a batch have the same examples.
    """
    found = []
    for number in (2, 1):
        backend.seed(0)
        net = networks_with_batch_norm(backend)[normalized_network](backend.cpu())
        start = read_saved_values(backend, net)
        trainer = Trainer(2, number, backend=backend)
        data = make_normal_batches(has_equal_halves=True)
        trainer.fit(net, data, loss="cross_entropy", lr=0.0)
        found.append(read_saved_values(backend, trainer.model))
    assert_same_statistics(*found, start)


def _list_refused(backend, net):
    """Return the statistics that a model is not trained with on two GPUs."""
    refused = []
    for statistics in ("global", "local"):
        try:
            backend.learner(net, devices=["gpu:0", "gpu:1"], batch_norm=statistics)
        except UnsupportedValueError as error:
            if f"batch_norm={statistics!r}" in error.attempted:
                refused.append(statistics)
    return refused


@requirement("several.refuse-other-statistics", section=SECTION, source="contract, Several GPUs")
@pytest.mark.needs("train on several GPUs")
def test_a_layer_with_other_statistics_is_refused(backend, normalized_network):
    """Refuse ``batch_norm`` for layers with other statistics, and accept any other network.

    The number of GPUs would change what is learned, although the user has asked for one of both.
    """
    build = networks_with_batch_norm(backend)[normalized_network]
    refused = _list_refused(backend, build(backend.gpu(0)))
    assert len(refused) == 1
    assert _list_refused(backend, backend.mlp([4, 2], device="gpu:0")) == []

    def measure(number, batches):
        backend.seed(0)
        trainer = Trainer(1, number, backend=backend)
        return trainer.fit(build(backend.cpu()), batches, loss="cross_entropy", lr=0.0)["loss"]

    # The halves are two shards, whose means are far from each other.
    draw, labels = np.random.default_rng(0), (np.arange(16) // 8).astype("int32")
    x = draw.normal(np.repeat([0, 9], 8)[:, np.newaxis], 1, (16, 4)).astype("float32")
    losses = {
        "global": measure(1, [(x, labels)]),
        "local": measure(1, [(x[:8], labels[:8]), (x[8:], labels[8:])]),
    }
    other = losses.pop(*refused)
    found = measure(2, [(x, labels)])
    assert [found] == [pytest.approx(loss, rel=1e-4) for loss in losses.values()]
    assert found != pytest.approx(other, rel=1e-3)


@requirement("several.draw-own-masks", section=SECTION, source="contract, Several GPUs")
def test_each_gpu_has_masks_of_its_own(backend, network):
    """Drop other numbers on each GPU.

    Equal masks for all shards regularize less. Here both shards have the same examples, and one of
    them counts.
    """
    half = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
    batch = {"x": np.concatenate([half, half]), "y": np.zeros(8, "int32")}
    losses = []
    for counted in (0, 0, 1):
        backend.seed(0)
        weights = np.repeat(np.eye(2, dtype="float32")[counted], 4)
        trainer = Trainer(1, 2, backend=backend)
        net = networks(backend)[network](backend.cpu())
        data = [{**batch, "sample_weight": weights}]
        losses += trainer.fit(net, data, loss="cross_entropy", lr=0.1)["loss"]
    first, again, second = losses
    assert first == pytest.approx(again, rel=1e-5)
    assert first != pytest.approx(second, rel=1e-3)


def _weigh(prediction, y):
    """Return the mean of squares, each by a number of a list and by an image of another list."""
    rows = [
        (prediction[i, 0] - y["wanted"][i]) ** 2 * weight * y["images"][i][0, 0]
        for i, weight in enumerate(y["weights"])
    ]
    return sum(rows) / len(rows) * y["scales"][1] * y["table"][2, 0]


def _lists(examples=14, batch_size=5):
    """Return batches whose targets have lists, and what is the same for all examples."""
    weights = [float(1 + i % 4) for i in range(examples)]
    images = [np.full((3, i + 1), 0.5 + i % 3, "float32") for i in range(examples)]
    table = np.arange(3, dtype="float32").reshape(3, 1)
    begin = 0
    for x, y in _data(examples, batch_size):
        own = slice(begin, begin + len(x))
        y = {
            "wanted": y.astype("float32"),
            "weights": weights[own],
            "images": images[own],
            "scales": Broadcast([2.0, 0.5, 3.0]),
            "table": Broadcast(table),
        }
        begin += len(x)
        yield {"x": x, "y": y}


@requirement(
    "several.split-sequences", section=SECTION, source="contract, What of a batch is split"
)
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_lists_of_a_batch_are_split_and_broadcast_values_are_not(backend, accumulate_grad_batches):
    """Split lists of a batch over GPUs, and share ``Broadcast`` values.

    Targets come as lists, and class weights are for all.
    """
    data = list(_lists())
    options = {
        "loss": _weigh,
        "metrics": (),
        "accumulate_grad_batches": accumulate_grad_batches,
        "lr": 0.01,
    }
    options |= {"val_data": data[1:]}
    assert_same_run(_fit(backend, 2, data, **options), _fit(backend, 1, data, **options))


@requirement("several.leave-out-labels", section=SECTION, source="contract, Labels")
@pytest.mark.parametrize(
    ("left_out", "weights"),
    [([0, 1, 3], None), ([0, 1, 3], [1, 3, 0.5, 2, 1]), ([3, 4], None), ([0, 1, 2, 3, 4], None)],
    ids=["some", "weighted", "of one GPU", "all"],
)
def test_the_mean_is_over_the_labels_of_the_whole_batch(backend, left_out, weights):
    """Take the mean over the labels that count of the whole batch.

    A part may have no label that counts.
    """
    (x, y), *_ = _data()
    y[left_out] = -100
    data = [(x, y)]
    if weights is not None:
        data = [{"x": x, "y": y, "sample_weight": np.array(weights, "float32")}]
    assert_same_run(_fit(backend, 2, data), _fit(backend, 1, data))


@requirement("several.leave-out-labels", section=SECTION, source="contract, Labels")
def test_labels_on_a_gpu_are_left_out_as_those_on_the_host(backend):
    """Leave out labels on a GPU as on the host.

    Batches may be on the device already.
    """
    (x, y), *_ = _data()
    y[[0, 1, 3]] = -100
    data = [(backend.asarray(x, device="gpu:0"), backend.asarray(y, device="gpu:0"))]
    assert_same_run(_fit(backend, 2, data), _fit(backend, 1, [(x, y)]))


@requirement(
    "several.leave-the-model-on-the-first", section=SECTION, source="contract, Several GPUs"
)
def test_the_model_is_on_the_first_gpu_afterwards(backend):
    """Leave the model on the first GPU after a run.

    The next line uses it there.
    """
    trainer = _fit(backend, 2)[2]
    assert trainer.gpus == [backend.gpu(0), backend.gpu(1)]
    assert set(backend.placement(trainer.model).values()) == {backend.gpu(0)}


class Watching:
    """A callback whose state comes back from where it is called, which may be another process."""

    def __init__(self, trainer):
        self.trainer, self.seen, self.losses = trainer, [], []

    def on_epoch_end(self, epoch, history):
        self.seen.append(read_saved_values(self.trainer.backend, self.trainer.model))

    def on_step_end(self, step, loss):
        self.losses.append(float(self.trainer.backend.to_numpy(loss)))

    def state_dict(self):
        return {"seen": self.seen, "losses": self.losses}

    def load_state_dict(self, state):
        self.seen, self.losses = state["seen"], state["losses"]


@requirement("several.stop", section=SECTION, source="contract, Training")
@pytest.mark.parametrize("last", [4, 5], ids=["within", "at the end"])
def test_two_gpus_stop_after_the_step_or_the_epoch(backend, last):
    """Stop two GPUs after the same step or epoch as one."""
    trainers = []
    for number in (2, 1):
        backend.seed(0)
        trainer = Trainer(4, number, backend=backend, callbacks=AfterStep(last))
        trainer.fit(backend.mlp([3, 8, 3]), _data(), loss="cross_entropy", lr=0.1)
        assert trainer.should_stop is True
        assert trainer.callbacks.steps == list(range(last + 1))
        trainers.append(trainer)
    two, one = ((read_saved_values(backend, each.model), each.history) for each in trainers)
    assert_same_run(two, one)


@requirement("several.error-in-a-callback", section=SECTION, source="contract, Training")
@pytest.mark.parametrize(
    ("callback", "error"),
    [
        (RaisingAfterStep(4), HookError),
        (RaisingAfterEpoch(StopIteration("mine")), StopIteration),
        (RaisingAfterEpoch(KeyboardInterrupt("mine")), KeyboardInterrupt),
    ],
    ids=["after a step", "StopIteration", "KeyboardInterrupt"],
)
def test_an_error_in_a_callback_keeps_the_parameters_of_two_gpus(backend, callback, error):
    """Keep the parameters of two GPUs after an error in a callback."""
    found = []
    for number in (2, 1):
        backend.seed(0)
        trainer = Trainer(4, number, backend=backend, callbacks=callback)
        with pytest.raises(error):
            trainer.fit(backend.mlp([3, 8, 3]), _data(), loss="cross_entropy", lr=0.1)
        found.append((read_saved_values(backend, trainer.model), trainer.history))
    assert_same_run(*found)


@requirement("several.show-the-model-in-callbacks", section=SECTION, source="contract, Callbacks")
def test_a_callback_sees_the_model_as_it_is(backend):
    """Show a callback the model as it is after the epoch.

    A copy of the model may lag behind.
    """
    backend.seed(0)
    trainer = Trainer(2, 2, backend=backend)
    watching = trainer.callbacks = Watching(trainer)
    trainer.fit(backend.mlp([3, 8, 3]), _data(), loss="cross_entropy", lr=0.1)
    (one, _, _), (two, _, _) = _fit(backend, 1, epochs=1), _fit(backend, 1, epochs=2)
    for values, wanted in zip(watching.seen, (one, two), strict=True):
        for name, value in values.items():
            np.testing.assert_allclose(value, wanted[name], **ROUNDING)
    assert len(watching.losses) == 2 * len(_data())


@requirement(
    "several.resume-with-another-number", section=SECTION, source="contract, Resuming a run"
)
@needs_float32
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)], ids=["2-1", "1-2"])
def test_a_run_goes_on_with_another_number_of_gpus(backend, tmp_path, before, after):
    """Resume a run with another number of GPUs.

    The next machine may have fewer cards.
    """
    options = {"optimizer": "adam", "checkpoint": tmp_path / "run"}
    _fit(backend, before, epochs=1, **options)
    resumed = _fit(backend, after, epochs=3, resume=True, **options)
    assert_same_run(resumed, _fit(backend, 1, optimizer="adam"))


@requirement("several.train-again", section=SECTION, source="contract, Training")
def test_a_second_fit_continues_with_the_trained_parameters(backend):
    """Continue in a second ``fit`` with the parameters of the first.

    The copies on the other GPUs have to be renewed.
    """

    def fit_twice(number):
        backend.seed(0)
        net = backend.mlp([3, 8, 3])
        for _ in range(2):
            trainer = Trainer(1, number, backend=backend)
            trainer.fit(net, _data(), loss="cross_entropy", lr=0.1)
            net = trainer.model
        return read_saved_values(backend, net)

    together, alone = fit_twice(2), fit_twice(1)
    for name, value in together.items():
        np.testing.assert_allclose(value, alone[name], **ROUNDING)


@requirement("several.predict-and-validate", section=SECTION, source="contract, Training")
def test_a_trainer_of_several_gpus_validates_and_predicts(backend):
    """Validate and predict with a trainer of several GPUs, in order.

    Parts that come back in another order belong to other rows.
    """
    _, history, trainer = _fit(backend, 2, epochs=1, val_data=_data(7, 3))
    found = trainer.validate(trainer.model, _data(7, 3), loss="cross_entropy", metrics=["accuracy"])
    assert found["loss"] == pytest.approx(history["val_loss"][0], rel=1e-5)
    assert [x.shape[0] for x in trainer.predict(trainer.model, _data(7, 3))] == [3, 3, 1]


@requirement(
    "several.hand-back-past-what-a-call-leaves", section=SECTION, source="contract, Several GPUs"
)
def test_a_model_whose_call_leaves_a_tensor_gets_the_parameters_of_two_gpus(
    backend, attention_model
):
    """Give a model its trained parameters back, whatever its calls have left.

    The copies differ in by-products alone.
    """
    x = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
    data = [(x, x.sum(1, keepdims=True))]
    backend.seed(0)
    trainer = Trainer(2, num_gpus=2, backend=backend)
    net = attention_models(backend)[attention_model](backend.cpu())
    first = trainer.fit(net, data, lr=0.1)["loss"]
    second = trainer.fit(trainer.model, data, lr=0.1)["loss"]
    # The third loss is that of the model that came back, and less than the second.
    assert first[0] > first[1] > second[0]
