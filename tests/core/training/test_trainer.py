"""``Trainer`` on the reference backend: its arguments, its hooks, its data, its history."""

import dataclasses
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

import d2ldev
from d2ldev import Trainer, UnsupportedValueError, gpu
from d2ldev.framework import CPU
from d2ldev.framework.testing import framework_of
from d2ldev.training.data import count_of

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


@pytest.fixture
def trainer(reference):
    return Trainer(2, backend=reference)


@pytest.fixture
def net(reference):
    return reference.mlp([2, 1])


# -- the devices ------------------------------------------------------------------------------


def test_no_gpus_is_the_cpu(reference):
    trainer = Trainer(1, num_gpus=0, backend=reference)
    assert (trainer.gpus, trainer.device) == ([], CPU)


def test_one_gpu_is_the_first(reference):
    trainer = Trainer(1, num_gpus=1, backend=reference)
    assert (trainer.gpus, trainer.device) == ([gpu(0)], gpu(0))


def test_try_all_gpus_lists_a_single_gpu(other):
    assert Trainer(1, num_gpus=-1, backend=other).gpus == [gpu(0)]


def test_all_gpus_of_a_machine_without_any_are_the_cpu(reference):
    none = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=0))
    assert Trainer(1, num_gpus=-1, backend=none).device is CPU


def test_try_all_gpus_lists_the_existing_gpus(reference):
    assert Trainer(1, num_gpus=-1, backend=reference).gpus == [gpu(0), gpu(1)]


def test_a_framework_that_trains_on_one_gpu_says_why(reference):
    class Alone(type(framework_of(reference))):
        cannot: ClassVar = {"train on several GPUs": "it has one lock"}

    alone = d2ldev.Backend(Alone(virtual_gpus=2))
    with pytest.raises(UnsupportedValueError, match=r"it has one lock\n.*num_gpus=1"):
        Trainer(1, num_gpus=2, backend=alone)
    with pytest.raises(UnsupportedValueError, match=r"it has one lock\n.*devices=\['gpu:0'\]"):
        alone.learner(alone.mlp([1, 1]), devices=["gpu:0", "gpu:1"])


@pytest.mark.parametrize(
    "arguments", [(-1,), (1.5,), (True,), ("2",), (None,), (1, -2), (1, 0.5), (1, True), (1, "1")]
)
def test_an_invalid_number_of_epochs_or_gpus_is_refused(reference, arguments):
    with pytest.raises(UnsupportedValueError):
        Trainer(*arguments, backend=reference)


def test_the_active_backend_is_used(reference):
    with d2ldev.use_backend(reference):
        assert Trainer(1).backend is reference


# -- the hooks --------------------------------------------------------------------------------


def test_the_model_gets_the_result_of_an_overridden_prepare_batch(reference, net):
    class Doubling(Trainer):
        def prepare_batch(self, batch):
            inputs, y = super().prepare_batch(batch)
            return inputs * 0.0, y

    history = Doubling(1, backend=reference).fit(net, [BATCH], lr=0.0)
    assert history["loss"] == [1.0]


def test_fit_of_none_says_so_and_nothing_of_prepare_model(reference):
    with pytest.raises(UnsupportedValueError, match="cannot train None: None is not a model\n"):
        Trainer(1, backend=reference).fit(None, [(np.ones((2, 2)), np.ones((2, 1)))])


def test_fit_trains_the_result_of_an_overridden_prepare_model(reference, net):
    other = reference.mlp([2, 1], seed=5)

    class Swapping(Trainer):
        def prepare_model(self, model):
            return super().prepare_model(other)

    trainer = Swapping(1, backend=reference)
    trainer.fit(net, [BATCH], lr=0.0)
    values = [reference.to_numpy(m.layers[0]["weight"]) for m in (trainer.model, other)]
    np.testing.assert_array_equal(*values)


def test_the_model_so_far_is_there_in_the_callback(reference, net):
    seen = []
    trainer = Trainer(2, backend=reference, callbacks=lambda *_: seen.append(trainer.model))
    trainer.fit(net, [BATCH])
    weights = [reference.to_numpy(model.layers[0]["weight"]) for model in seen]
    assert not np.array_equal(*weights)


def test_hooks_may_choose_another_device(reference, net):
    class OnTheSecond(Trainer):
        def prepare_model(self, model):
            return self.backend.place(model, "gpu:1")

        def prepare_batch(self, batch):
            return self.backend.to(batch, "gpu:1")

    trainer = OnTheSecond(1, backend=reference)
    trainer.fit(net, [BATCH])
    assert set(reference.placement(trainer.model).values()) == {gpu(1)}


# -- the data ---------------------------------------------------------------------------------


def test_a_generator_is_refused_where_it_would_be_used_up(trainer, net):
    with pytest.raises(UnsupportedValueError, match="ends after one epoch"):
        trainer.fit(net, (batch for batch in [BATCH]))


def test_a_generator_is_enough_for_one_epoch(reference, net):
    history = Trainer(1, backend=reference).fit(net, (batch for batch in [BATCH]))
    assert len(history["loss"]) == 1


@pytest.mark.parametrize("data", [[], iter([]), d2ldev.ArrayLoader(np.ones((0, 2)), batch_size=2)])
def test_data_without_a_batch_is_refused(reference, net, data):
    with pytest.raises(UnsupportedValueError, match="no batch"):
        Trainer(1, backend=reference).fit(net, data)


def test_data_to_evaluate_on_without_a_batch_is_refused_before_the_first_epoch(trainer, net):
    trainer.callbacks = lambda *_: pytest.fail("an epoch was run")
    with pytest.raises(UnsupportedValueError, match="cannot go through val_data"):
        trainer.fit(net, [BATCH], [])


@pytest.mark.parametrize("data", [None, 5])
def test_an_object_that_cannot_be_iterated_is_refused(trainer, net, data):
    with pytest.raises(UnsupportedValueError, match="not an iterable of batches"):
        trainer.fit(net, data)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_generator_is_closed_when_a_step_fails(reference, net, num_gpus):
    closed = []

    def batches():
        try:
            yield (np.ones((4, 3), "float32"), BATCH[1])
        finally:
            closed.append(True)

    source = batches()
    with pytest.raises(Exception, match=r"matmul|shape|core dimension"):
        Trainer(1, num_gpus, backend=reference).fit(net, source)
    assert closed == [True]


def test_a_backend_may_be_given_by_name(reference):
    assert Trainer(1, backend="reference").backend is reference


@pytest.mark.parametrize(("shape", "count"), [((5, 2), 5), ((), 1), ((0,), 0)])
def test_the_examples_of_a_batch_are_counted(reference, shape, count):
    @dataclasses.dataclass
    class Target:
        weight: float
        y: object

    for y in (np.zeros(shape), reference.zeros(shape)):
        assert count_of(reference, y) == count
        assert count_of(reference, [None, {"y": y}, 1]) == count
        assert count_of(reference, Target(0.5, y)) == count


# -- the history ------------------------------------------------------------------------------


def test_no_epochs_give_an_empty_history_and_the_model(reference, net):
    trainer = Trainer(0, backend=reference)
    assert trainer.fit(net, [BATCH]) == {"loss": [], "lr": []}
    assert trainer.model is net


def test_metrics_are_in_the_history_by_name(reference, net):
    def largest(prediction, y):
        return abs(prediction - y)[0, 0]

    history = Trainer(1, backend=reference).fit(net, [BATCH], [BATCH], metrics=[largest])
    assert list(history) == ["loss", "largest", "val_loss", "val_largest", "lr"]


@pytest.mark.parametrize("metrics", [["speed"], [3], ["accuracy", "accuracy"]])
def test_an_invalid_metric_is_refused(trainer, net, metrics):
    with pytest.raises(UnsupportedValueError):
        trainer.fit(net, [BATCH], metrics=metrics)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "hinge"},
        {"loss": 3},
        {"optimizer": "sdg"},
        {"optimizer": object()},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": "0.1"},
    ],
)
def test_invalid_losses_and_optimizers_are_refused(trainer, net, options):
    with pytest.raises(UnsupportedValueError):
        trainer.fit(net, [BATCH], **options)


@pytest.mark.parametrize("value", [-1, float("inf"), "1", True])
def test_an_invalid_norm_is_refused(reference, net, value):
    with pytest.raises(UnsupportedValueError, match="gradient_clip_val"):
        Trainer(1, 0, value, backend=reference).fit(net, [BATCH])


@pytest.mark.parametrize(
    "options",
    [
        *({"accumulate_grad_batches": value} for value in (0, -1, 1.5, "2", True, None)),
        *({"batch_norm": value} for value in ("mean", True, ["local"])),
        *({"precision": value} for value in ("fp8", "FP16", 8, None)),
    ],
    ids=str,
)
def test_an_invalid_schedule_step_is_refused_before_anything_moves(reference, net, options):
    (name,) = options
    with pytest.raises(UnsupportedValueError, match=f"train with {name}=") as error:
        Trainer(1, backend=reference, **options)
    assert error.value.fix.startswith(f"{name}=")
    with pytest.raises(UnsupportedValueError, match=f"train with {name}="):
        reference.learner(net, **options)


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.1}, {"optimizer": "sgd"}, {"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}],
    ids=lambda options: next(iter(options)),
)
def test_how_to_learn_is_refused_beside_a_model_that_is_only_evaluated(reference, net, options):
    with pytest.raises(UnsupportedValueError, match=f"with {next(iter(options))}=: "):
        reference.learner(net, is_trained=False, **options)


def test_a_model_that_is_only_evaluated_takes_no_step(reference, net):
    learner = reference.learner(net, is_trained=False)
    with pytest.raises(UnsupportedValueError, match="is_trained=False"):
        learner.step((reference.ones((1, 2)),), reference.ones((1, 1)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_the_framework_has_not_is_refused_with_the_reason(reference, precision):
    with pytest.raises(UnsupportedValueError, match="array-api-strict has no such dtype"):
        Trainer(1, backend=reference, precision=precision)


# -- the bar ----------------------------------------------------------------------------------


def test_without_a_bar_nothing_is_shown_and_rich_is_not_imported():
    program = (
        "import sys, numpy as np, d2ldev\n"
        "from d2ldev.training.trainer import Trainer\n"
        "backend = d2ldev.get_backend('reference')\n"
        "batch = (np.ones((4, 2), 'float32'), np.ones((4, 1), 'float32'))\n"
        "Trainer(1, backend=backend).fit(backend.mlp([2, 1]), [batch])\n"
        "assert 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- batches that are gone through without end --------------------------------------------------


def _wide():
    nested = [1.0]
    for _ in range(60):
        nested = [nested, nested]
    return nested


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("call", ["fit", "validate", "predict"])
@pytest.mark.parametrize("batch", [(_wide(), BATCH[1]), (BATCH[0], _wide())], ids=["X", "y"])
def test_a_batch_whose_containers_are_in_too_many_places_is_refused(other, call, batch, num_gpus):
    trainer = Trainer(1, num_gpus=num_gpus, backend=other)
    with pytest.raises(UnsupportedValueError, match="more than 100000 places"):
        getattr(trainer, call)(other.mlp([2, 1]), [batch])


def test_a_cycle_that_prepare_batch_returns_is_refused(reference, net):
    class Cyclic(Trainer):
        def prepare_batch(self, batch):
            cycle = list(batch)
            cycle[0] = cycle
            return cycle

    with pytest.raises(UnsupportedValueError, match="contains itself"):
        Cyclic(1, backend=reference).fit(net, [BATCH])


@pytest.mark.parametrize("call", ["fit", "validate"])
@pytest.mark.parametrize("key", ["y", "sample_weight"])
@pytest.mark.parametrize("value", [(), "text", True, 5, [1.0], {"a": 1.0}, slice(1)], ids=str)
def test_targets_and_weights_that_are_not_arrays_are_refused(reference, net, call, key, value):
    batch = {"X": BATCH[0], "y": BATCH[1], key: value}
    with pytest.raises(
        UnsupportedValueError, match=f"whose {key} is .* (it is not an array|y has no axis)"
    ):
        getattr(Trainer(1, backend=reference), call)(net, [batch])


def test_an_invalid_target_is_refused(reference, net):
    with pytest.raises(UnsupportedValueError, match="whose y is None"):
        Trainer(1, backend=reference).fit(net, [(BATCH[0], None)])


def test_a_run_that_resumes_hears_of_a_wrong_label_again(reference, path):
    """The checkpoint within the epoch is not written past the batch of the label."""
    x, y = np.ones((4, 2), "float32"), np.zeros(4, "int64")
    batches = [(x, y), (x, y + 9), (x, y)]
    saving = {"checkpoint": path, "checkpoint_every": 2, "resume": True}
    for _ in range(2):
        with pytest.raises(UnsupportedValueError, match="with the label 9"):
            Trainer(1, backend=reference).fit(
                reference.mlp([2, 3]), batches, loss="cross_entropy", **saving
            )
