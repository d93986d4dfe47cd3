"""Everything public can be pickled and copied, or says in words why not."""

import copy
import pickle
from importlib.util import find_spec

import numpy as np
import pytest

import d2ldev
from d2ldev import UnsupportedValueError, results

X, Y = np.arange(16, dtype="float32").reshape(8, 2), np.ones((8, 1), "float32")


class Scheduler:
    """A scheduler as PyTorch has them."""

    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1


def mean_error(y_true, y_pred):
    """Return what scikit-learn's functions of this kind do."""
    return np.abs(y_true - y_pred).mean()


def use(trainer):
    """Return a trainer after a run."""
    trainer.fit(trainer.backend.mlp([2, 1]), d2ldev.ArrayLoader(X, Y, batch_size=4))
    return trainer


def log(backend, **options):
    found = d2ldev.DeviceLog(backend, **options)
    for value in (3.0, 1.0):
        found.add(2, loss=backend.full((), value, device="gpu:0"))
    return found


OBJECTS = {
    "Backend": [lambda b: b],
    "backend": [lambda _: d2ldev.backend],
    "Broadcast": [lambda _: d2ldev.Broadcast(3)],
    "Device": [lambda _: d2ldev.cpu(), lambda _: d2ldev.gpu(1)],
    "ArrayLoader": [
        lambda _: d2ldev.ArrayLoader(X, batch_size=4, shuffle=True),
        lambda _: d2ldev.ArrayLoader(X, batch_size=4).shard(0, 2),
    ],
    "CSVLogger": [lambda _: d2ldev.CSVLogger("run.csv")],
    "DeviceLog": [log, lambda b: log(b, values=False)],
    "EarlyStopping": [lambda _: d2ldev.EarlyStopping()],
    "EpochMetric": [lambda _: d2ldev.EpochMetric(mean_error)],
    "Schedule": [lambda _, per=per: d2ldev.Schedule(Scheduler(), per) for per in ("epoch", "step")],
    "TensorBoardLogger": [lambda _: d2ldev.TensorBoardLogger("run")]
    if find_spec("tensorboard")
    else [],
    "Timer": [lambda _: d2ldev.Timer(), d2ldev.Timer],
    "Trainer": [
        lambda b: d2ldev.Trainer(1, backend=b),
        lambda b: d2ldev.Trainer(1, backend=b, callbacks=d2ldev.Schedule(Scheduler(), "step")),
        lambda b: use(d2ldev.Trainer(1, backend=b)),
        lambda b: use(d2ldev.Trainer(1, backend=b)).history,
    ],
    "use_backend": [lambda _: d2ldev.use_backend("reference")],
    "WeightedLoss": [lambda _: d2ldev.WeightedLoss(1.0, 2.0)],
}
"""Objects of each class of ``d2ldev.__all__`` that is neither an error nor a warning."""

RESULTS = {
    "History": lambda b: use(d2ldev.Trainer(1, backend=b)).history,
    "LiveTensor": lambda b: first_live(b, b.ones((2, 2), device="gpu:1")),
    "Memory": lambda b: b.memory("gpu:1"),
    "Summary": lambda b: b.summarize(b.mlp([2, 1])),
    "Timing": lambda b: b.timeit(b.ones, 2, seconds=0.01),
}
"""Results of ``d2ldev.results`` that need no file and no watch, and hold no model."""

COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def first_live(backend, x):
    return next(each for each in backend.live_tensors(x.device) if each.shape == x.shape)


def make_error(cls):
    is_own = issubclass(cls, d2ldev.D2LDevError)
    return cls("make a tensor", "there is none", "d2ldev.cpu()") if is_own else cls("a text")


def list_objects(name):
    found = getattr(d2ldev, name)
    if isinstance(found, type) and issubclass(found, Exception):
        return [lambda _: make_error(found)]
    # A function is pickled by its name. A class is, too, and has objects of its own.
    has_objects = isinstance(found, (type, d2ldev.Backend))
    return [lambda _: found, *(OBJECTS[name] if has_objects else ())]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", d2ldev.__all__)
def test_a_public_object_can_be_pickled_and_copied(reference, name, copied):
    for make in list_objects(name):
        found = make(reference)
        twin = copied(found)
        assert type(twin) is type(found)
        assert repr(twin).partition(" at 0x")[0] == repr(found).partition(" at 0x")[0]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_can_be_pickled_and_copied(reference, name, copied):
    found = RESULTS[name](reference)
    assert type(found) is getattr(results, name)
    assert repr(copied(found)) == repr(found)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copied_log_goes_on_alone(reference, copied):
    first = log(reference)
    second = copied(first)
    second.add(loss=reference.full((), 8.0, device="gpu:0"))
    assert (first.means(), first.flush()) == ({"loss": 2.0}, {"loss": [3.0, 1.0]})
    assert second.flush() == {"loss": [3.0, 1.0, 8.0]}
    assert second.means() == {"loss": 3.2}


@pytest.mark.parametrize("copied", [COPIES["pickle"], copy.deepcopy])
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_copied_schedule_steps_its_own_scheduler(reference, per, copied):
    schedule = d2ldev.Schedule(Scheduler(), per)
    twin = copied(schedule)
    use(d2ldev.Trainer(1, backend=reference, callbacks=twin))
    assert (schedule.scheduler.count, twin.scheduler.count) == (0, {"step": 2, "epoch": 1}[per])


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_learner_says_why_it_cannot_be_copied(reference, copied):
    learner = reference.learner(reference.mlp([2, 1]))
    with pytest.raises(UnsupportedValueError, match="trains one model, in one process") as error:
        copied(learner)
    assert "learner.sync()" in error.value.fix
