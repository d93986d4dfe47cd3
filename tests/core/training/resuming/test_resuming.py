"""A run that ends, and goes on from its checkpoint: what is refused, and what is kept."""

import os
import random
import re

import numpy as np
import pytest

import d2ldev
from d2ldev import CheckpointError, Trainer, UnsupportedValueError

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


@pytest.fixture
def trainer(reference):
    return Trainer(2, backend=reference)


@pytest.fixture
def net(reference):
    return reference.mlp([2, 1])


def test_resuming_needs_the_name_of_a_checkpoint(trainer, net):
    with pytest.raises(CheckpointError, match="no checkpoint is named"):
        trainer.fit(net, [BATCH], resume=True)


@pytest.mark.parametrize("path", [3, b"", "", "a\0b"])
def test_an_invalid_path_is_refused_before_the_first_batch(trainer, net, path):
    with pytest.raises(UnsupportedValueError, match="not the path of a file"):
        trainer.fit(net, [BATCH], checkpoint=path)


def test_a_path_may_be_bytes(trainer, net, tmp_path):
    trainer.fit(net, [BATCH], checkpoint=os.fsencode(tmp_path / "run"))
    assert (tmp_path / "run").exists()


def test_resuming_without_a_file_begins_at_the_beginning(trainer, net, tmp_path):
    history = trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True)
    assert len(history["loss"]) == 2


def test_a_file_of_something_else_is_refused(reference, trainer, net, tmp_path):
    reference.save({"x": reference.ones(1)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="does not hold the state of a training run"):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "other", resume=True)


@pytest.mark.parametrize("version", [1, 9, 11])
def test_a_file_of_another_version_is_refused_as_that(reference, trainer, net, tmp_path, version):
    reference.save({"format": f"d2ldev training state {version}"}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="another version of d2ldev wrote"):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "other", resume=True)


@pytest.mark.parametrize("loader_first", [True, False])
def test_a_run_is_not_resumed_with_data_that_shuffles_otherwise(
    trainer, net, tmp_path, loader_first
):
    loader = d2ldev.ArrayLoader(*BATCH, batch_size=2, shuffle=True)
    first, second = (loader, [BATCH]) if loader_first else ([BATCH], loader)
    trainer.fit(net, first, checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError, match="another loader"):
        trainer.fit(net, second, checkpoint=tmp_path / "run", resume=True)


def test_a_state_of_another_model_is_refused(reference, trainer, net, tmp_path):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"it lacks model\.layers\.1\.weight"):
        trainer.fit(reference.mlp([2, 3, 1]), [BATCH], checkpoint=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ({"lr": 0.2}, "fit(..., lr=0.1)"),
        ({"optimizer": "adam"}, "fit(..., optimizer='sgd')"),
        ({"loss": "cross_entropy"}, "fit(..., loss='mse')"),
        ({"lr": 0.2, "optimizer": "adam"}, "fit(..., optimizer='sgd', lr=0.1)"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(trainer, net, tmp_path, other, fix):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", lr=0.1)
    with pytest.raises(CheckpointError, match=re.escape(f"fix: {fix}")):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True, **{"lr": 0.1, **other})


def test_a_run_is_not_resumed_with_another_clip(reference, trainer, net, tmp_path):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    clipping = Trainer(3, gradient_clip_val=1.0, backend=reference)
    with pytest.raises(CheckpointError, match=r"Trainer\(max_epochs, gradient_clip_val=0\.0\)"):
        clipping.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True)


def test_a_run_is_not_resumed_with_other_batches_in_a_step(reference, trainer, net, tmp_path):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    accumulating = Trainer(3, accumulate_grad_batches=2, backend=reference)
    with pytest.raises(CheckpointError, match=r"Trainer\(max_epochs, accumulate_grad_batches=1\)"):
        accumulating.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True)


@pytest.mark.parametrize("other", [{"val_data": [BATCH]}, {"metrics": [lambda p, y: 0.0]}])
def test_a_run_is_not_resumed_that_measures_something_else(trainer, net, tmp_path, other):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError, match="the run measured loss, lr\n"):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True, **other)


WRONG = {
    "epoch": (-1, 9, "2"),
    "history": ({"loss": 3}, {"loss": [1.0]}, {"loss": ["1", "2"]}, None),
    "settings": (["sgd"], {}, 3),
    "data": (3, {}),
    "random": (),
    "modes": (),
    "step": (-1, "2", None),
    "callbacks": (None, [1]),
    "within": (3, {}),
}
GONE = object()


@pytest.mark.parametrize(
    ("part", "value"), [(part, value) for part in WRONG for value in (*WRONG[part], GONE)]
)
def test_a_state_with_a_part_that_is_wrong_is_refused(
    reference, trainer, net, tmp_path, part, value
):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    state = reference.load(tmp_path / "run")
    del state["run"][part]
    if value is not GONE:
        state["run"][part] = value
    reference.save(state, tmp_path / "run")
    with pytest.raises(CheckpointError):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "components",
    [None, 3, {}, {"model": 3, "optimizer": {}}, {"model": {}, "optimizer": None}],
    ids=str,
)
def test_a_state_with_other_components_is_refused_and_changes_nothing(
    reference, trainer, net, tmp_path, components
):
    trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    state = reference.load(tmp_path / "run")
    reference.save({**state, "components": components}, tmp_path / "run")
    with pytest.raises(CheckpointError):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True)
    assert trainer.model is net


def test_a_run_that_is_not_resumed_leaves_everything_as_it_was(reference, trainer, net, tmp_path):
    def loader():
        return d2ldev.ArrayLoader(*BATCH, batch_size=2, shuffle=True)

    trainer.fit(net, loader(), checkpoint=tmp_path / "run")
    data, numbers = loader(), random.getstate()
    random.random()
    moved = random.getstate()
    with pytest.raises(CheckpointError):
        trainer.fit(reference.mlp([2, 3, 1]), data, checkpoint=tmp_path / "run", resume=True)
    assert (data.state_dict()["epoch"], random.getstate()) == (0, moved)
    assert moved != numbers


class Refusing:
    """A loader whose state does not fit it."""

    def __init__(self, reason=None):
        self.reason = reason

    def __iter__(self):
        return iter([BATCH])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if self.reason is not None:
            raise self.reason


@pytest.mark.parametrize(
    "reason", [ValueError("odd"), KeyError("seed"), CheckpointError("go on", "odd", "none")]
)
def test_a_model_stays_as_it_was_if_the_loader_refuses_its_state(
    reference, trainer, net, tmp_path, reason
):
    trainer.fit(net, Refusing(), checkpoint=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"odd|seed"):
        trainer.fit(net, Refusing(reason), checkpoint=tmp_path / "run", resume=True)
    found = reference.named_tensors(trainer.model)
    for name, x in reference.named_tensors(net).items():
        np.testing.assert_array_equal(
            reference.to_numpy(found[name]), reference.to_numpy(x), err_msg=name
        )


def test_the_state_of_a_loader_is_on_the_host(reference, net, tmp_path):
    """Wherever the model is."""
    seen = []

    class Loader(Refusing):
        def state_dict(self):
            return {"x": reference.ones(2)}

        def load_state_dict(self, state):
            seen.append(reference.device_of(state["x"]))

    for resume in (False, True):
        Trainer(1, 1, backend=reference).fit(
            net, Loader(), checkpoint=tmp_path / "run", resume=resume
        )
    assert seen == [reference.cpu()]


class Cutting:
    """Ends a run after three steps."""

    def on_step_end(self, step, loss):
        if step == 2:
            raise InterruptedError


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": -1},
        {"batches": "2"},
        {"log": 3},
        {"log": {"totals": {}}},
        {"log": {"totals": {"loss": [1.0]}, "last": {"loss": 1.0}}},
        {"log": {"totals": {"loss": [1.0, 2.0]}, "last": {}}},
        {"log": {"totals": {"loss": ["1", 2.0]}, "last": {"loss": 1.0}}},
        {"log": {"totals": {"loss": [1.0, 2.0]}, "last": {"loss": "1"}}},
        {"host": 3},
        {"more": 3},
    ],
    ids=str,
)
def test_a_state_within_an_epoch_that_is_wrong_is_refused(reference, trainer, net, tmp_path, wrong):
    trainer.callbacks, data = Cutting(), [BATCH] * 4
    with pytest.raises(InterruptedError):
        trainer.fit(net, data, checkpoint=tmp_path / "run", checkpoint_every=2)
    state = reference.load(tmp_path / "run")
    assert state["run"]["within"]["batches"] == 2
    state["run"]["within"].update(wrong)
    reference.save(state, tmp_path / "run")
    with pytest.raises(CheckpointError):
        trainer.fit(net, data, checkpoint=tmp_path / "run", resume=True)


def test_a_run_within_an_epoch_is_not_resumed_with_less_data(trainer, net, tmp_path):
    trainer.callbacks, data = Cutting(), [BATCH] * 4
    with pytest.raises(InterruptedError):
        trainer.fit(net, data, checkpoint=tmp_path / "run", checkpoint_every=2)
    with pytest.raises(CheckpointError, match="2 batches of the epoch were done"):
        trainer.fit(net, data[:1], checkpoint=tmp_path / "run", resume=True)


def test_a_run_may_go_on_within_an_epoch_without_saving_there(trainer, net, tmp_path):
    expected = trainer.fit(net, [BATCH] * 4)
    trainer.callbacks = Cutting()
    with pytest.raises(InterruptedError):
        trainer.fit(net, [BATCH] * 4, checkpoint=tmp_path / "run", checkpoint_every=2)
    trainer.callbacks = None
    assert trainer.fit(net, [BATCH] * 4, checkpoint=tmp_path / "run", resume=True) == expected


def test_an_epoch_with_nan_is_never_the_best(reference, net, tmp_path):
    bad = (BATCH[0], BATCH[1] * np.float32("nan"))
    trainer = Trainer(1, backend=reference)
    trainer.fit(net, [BATCH], [bad], best=tmp_path / "run")
    assert reference.load(tmp_path / "run")["run"]["epoch"] == 0


def test_a_finished_run_that_is_resumed_does_nothing_more(reference, trainer, net, tmp_path):
    first = trainer.fit(net, [BATCH], checkpoint=tmp_path / "run")
    again = Trainer(2, backend=reference, callbacks=lambda *_: pytest.fail("an epoch was run"))
    assert again.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True) == first


def test_a_run_may_be_saved_after_more_steps_than_python_counts(reference, tmp_path):
    batch = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
    trainer = Trainer(1, backend=reference)
    path = tmp_path / "run.safetensors"
    history = trainer.fit(reference.mlp([2, 1]), [batch], checkpoint=path, checkpoint_every=2**70)
    assert len(history["loss"]) == 1
