"""Whatever stands in the checkpoint of a run, ``resume`` goes on or refuses it, and soon."""

import copy
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import d2ldev
from d2ldev import CheckpointError, Trainer
from d2ldev.distributed.random_states import check_random_state, random_state
from d2ldev.errors import D2LDevError

REFERENCE = d2ldev.get_backend("reference")
X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


class Counting:
    """A callback with a state."""

    def __init__(self, end=None):
        self.count, self.end = 0, end

    def on_step_end(self, step, loss):
        self.count += 1
        if step == self.end:
            raise InterruptedError

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"] + 0


def loader():
    return d2ldev.ArrayLoader(X, Y, batch_size=2, shuffle=True)


def fit_model(path, *, resume, end=None):
    trainer = Trainer(2, backend=REFERENCE, callbacks=Counting(end))
    net = REFERENCE.mlp([2, 3, 1], seed=1)
    options = {"checkpoint": path, "resume": resume, "checkpoint_every": 3, "optimizer": "adam"}
    return trainer.fit(net, loader(), **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "run"


@pytest.fixture(scope="module")
def state(path):
    """Returns the state of a run within its second epoch, with other parts.

    It is a function because Hypothesis shows what a test is given.
    """
    with pytest.raises(InterruptedError):
        fit_model(path, resume=False, end=6)
    loaded = REFERENCE.load(path)
    assert loaded["run"]["within"] is not None
    return lambda run: {**loaded, "run": {**copy.deepcopy(loaded["run"]), **run}}


@pytest.fixture(autouse=True)
def _random_numbers():
    """The test leaves the random numbers that every run sets as they were."""
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def share():
    nesting = [1]
    for _ in range(60):
        nesting = [nesting, nesting]
    return nesting


def text_shared():
    nesting = {"a": 1}
    for _ in range(60):
        nesting = {"a": nesting, "b": nesting}
    return nesting


ODD = [
    *(None, True, -1, 0, 10**12, 2**63, 2**70, 2**4_000_000, 0.5, float("nan"), float("inf")),
    *("", "loss", "\ud800", "x" * 100_000, b"\0" * 5000, 1j, np.float32(1), np.int64(3)),
    *([], {}, (), set(), [[]], [None] * 3, [1.0, 2.0], {"loss": 3}, {1: 2, None: [3]}),
    *(np.zeros((2**31, 0)), np.zeros(3), np.array(2), np.array([np.nan]), np.zeros(5000, "uint8")),
    *(REFERENCE.ones(3), REFERENCE.asarray(1), share(), text_shared(), [share()]),
]


def places(value):
    """Return every ``(container, key)``, those of a container that is shared once."""
    found, seen, todo = [], set(), [value]
    while todo:
        container = todo.pop()
        seen.add(id(container))
        for key in container if isinstance(container, dict) else range(len(container)):
            found.append((container, key))
            if isinstance(container[key], (dict, list)) and id(container[key]) not in seen:
                todo.append(container[key])
    return found


def is_resumed_or_refused(path, state):
    try:
        REFERENCE.save(state, path)
        fit_model(path, resume=True)
    except D2LDevError as error:
        text = str(error)
        assert len(text) < 5000
        return text
    return ""


def test_the_state_that_is_changed_is_one_that_can_be_resumed(path, state):
    assert is_resumed_or_refused(path, state({})) == ""


EDIT = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["put", "drop", "add"]),
    st.sampled_from(range(len(ODD))),
)


@settings(max_examples=300)
@given(edits=st.lists(EDIT, min_size=1, max_size=2))
def test_a_state_that_was_changed_is_resumed_or_refused(path, state, edits):
    changed = state({})
    for where, what, odd in edits:
        found = places(changed["run"])
        container, key = found[int(where * len(found))]
        if what == "put":
            container[key] = ODD[odd]
        elif what == "drop":
            del container[key]
        elif isinstance(container, list):
            container.append(ODD[odd])
        else:
            container["more"] = ODD[odd]
    is_resumed_or_refused(path, changed)


@pytest.mark.nightly
@pytest.mark.parametrize("odd", range(len(ODD)), ids=lambda odd: type(ODD[odd]).__name__)
def test_every_part_of_a_state_may_be_odd(path, state, odd):
    for number in range(len(places(state({})["run"]))):
        changed = state({})
        container, key = places(changed["run"])[number]
        container[key] = ODD[odd]
        is_resumed_or_refused(path, changed)


@pytest.mark.parametrize(
    "odd", [share(), text_shared(), [0.0] * 1_000_001], ids=["list", "dict", "long"]
)
def test_a_state_with_too_many_values_is_refused(path, state, odd):
    changed = state({"modes": odd})
    x = np.zeros(100_000_000, "uint8")
    changed["components"] = {"x": x}  # so that the file is large enough for the long list
    assert "values" in is_resumed_or_refused(path, changed)


def test_more_batches_than_the_data_has_are_refused_before_anything_changes(path, state):
    changed = state({"step": 2 * 10**12})
    changed["run"]["within"]["batches"] = 10**12
    assert "the data has fewer" in is_resumed_or_refused(path, changed)


def test_more_batches_than_steps_are_refused(path, state):
    changed = state({"step": 2})
    changed["run"]["within"]["batches"] = 3
    assert "does not hold the state of a training run" in is_resumed_or_refused(path, changed)


def test_numbers_that_the_history_has_not_are_refused(path, state):
    changed = state({})
    changed["run"]["within"]["log"]["totals"]["more"] = [1.0, 2.0]
    changed["run"]["within"]["log"]["last"]["more"] = 0.5
    assert "does not hold the state of a training run" in is_resumed_or_refused(path, changed)


@pytest.mark.parametrize("seed", [2**128, 2**4_000_000], ids=["129 bits", "4 million bits"])
def test_a_seed_is_of_at_most_128_bits(seed):
    with pytest.raises(CheckpointError):
        loader().load_state_dict({"seed": seed, "epoch": 0})
    with pytest.raises(d2ldev.UnsupportedValueError, match="more than 128 bits"):
        d2ldev.ArrayLoader(X, Y, batch_size=2, seed=seed)
    assert (
        d2ldev.ArrayLoader(X, Y, batch_size=2, seed=2**128 - 1).state_dict()["seed"] == 2**128 - 1
    )


def test_the_numbers_of_a_random_state_are_counted_before_they_are_read():
    saved = random_state()
    version, _, drawn = saved["python"]
    saved["python"] = [version, np.zeros(10_000_000, "uint8"), drawn]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            check_random_state(saved)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
