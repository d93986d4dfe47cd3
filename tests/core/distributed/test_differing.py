"""Processes that do not do the same: an error of d2ldev's on every rank, in bounded time."""

import os
import pickle
import platform
import signal
import sys
import threading
import time
from importlib.metadata import version

import numpy as np
import pytest
from launched import LIMIT, together
from processes import make_distribution
from reference_backend import ReferenceGroupLearner

import d2ldev
from d2ldev import ArrayLoader, Trainer
from d2ldev.distributed import join
from d2ldev.distributed.membership import list_versions
from d2ldev.framework.testing import framework_of

SOON = 35
"""Seconds; the timeout is longer."""
TIMEOUT = 40

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = (np.arange(20) % 3).astype("int32")


def batches(size=5, examples=20, shift=0):
    x, y = X[:examples], np.roll(Y, shift)[:examples]
    return [(x[i : i + size], y[i : i + size]) for i in range(0, examples, size)]


def fit(rank=0, *, hidden=8, data=None, epochs=2, num_gpus=0, callbacks=None, clip=0, **options):
    backend = d2ldev.get_backend("reference")
    trainer = Trainer(
        epochs, num_gpus, backend=backend, callbacks=callbacks, gradient_clip_val=clip
    )
    options = {"loss": "cross_entropy", **options}
    net = backend.mlp([4, hidden, 3], seed=0)
    trainer.fit(net, batches() if data is None else data, **options)
    named = backend.named_tensors(trainer.model)
    return float(sum((backend.to_numpy(x) ** 2).sum() for x in named.values()))


def check_all(ended, kind, *texts):
    for each in ended:
        assert each.error == kind, each
        assert each.status == 1
        assert each.seconds < SOON
        for text in texts:
            assert text in each.text, each


def differ(**of_rank_1):
    return lambda rank: fit(rank, **(of_rank_1 if rank == 1 else {}))


class Raising:
    """Data, a callback or a metric that raises at its third call."""

    def __init__(self, error=ValueError):
        self.calls, self.error = 0, error

    def __call__(self, *_):
        self.calls += 1
        if self.calls == 3:
            raise self.error("mine")

    def __iter__(self):
        for batch in batches():
            self()
            yield batch

    def on_step_end(self, step, loss):
        self()


class Empty:
    """Batches of which the second one is empty."""

    def __iter__(self):
        yield from [batches()[0], (X[:0], Y[:0])]


class Hidden:
    """Batches of a loader whose order nobody else knows."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


DIFFERENCES = {
    "models": ({"hidden": 9}, "layers.0.weight float32[8, 4]", "layers.0.weight float32[9, 4]"),
    "optimizers": ({"optimizer": "adam"}, "'optimizer': 'adam'"),
    "learning rates": ({"lr": 0.5}, "'lr': 0.5"),
    "clipping": ({"clip": 0.5}, "'gradient_clip_val': 0.5"),
    "losses": ({"loss": "mse"}, "'loss': 'mse'"),
    "metrics": ({"metrics": ["accuracy"]}, "accuracy"),
    "epochs": ({"epochs": 3}, "3 epochs"),
    "validation": ({"val_data": batches()}, "val_loss"),
    "shapes of batches": ({"data": batches(size=4)}, "batch 0 of epoch 0", "(4, 4)"),
    "targets": ({"data": batches(shift=1)}, "batch 0 of epoch 0", "targets"),
    "data that ends early": ({"data": batches()[:3]}, "batch 3 of epoch 0", "the end of epoch 0"),
    "checkpoints": ({"checkpoint": "one"}, "'checkpoint': True"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_all_processes_name_the_difference(case):
    options, *texts = DIFFERENCES[case]
    ended = together(differ(**options), timeout=TIMEOUT)
    check_all(ended, "UnsupportedValueError", "they do not do the same", *texts)


def test_parts_of_batches_with_other_examples_differ():
    def body(rank):
        loader = ArrayLoader(X, Y, batch_size=5, shuffle=True, seed=rank)
        return fit(data=Hidden(loader.shard(rank, 2)))

    texts = "do not do the same", "batch 0 of epoch 0", "5 examples", "model, versions and seeds"
    check_all(together(body, timeout=TIMEOUT), "UnsupportedValueError", *texts)


@pytest.mark.parametrize("name", ["d2ldev", "array-api-strict"])
def test_other_versions_are_refused_and_named(tmp_path, name):
    make_distribution(tmp_path, name.replace("-", "_"), {})

    def body(rank):
        if rank == 1:
            sys.path.insert(0, str(tmp_path))
        return fit()

    ended = together(body, timeout=TIMEOUT)
    texts = f"rank 0 has {name} '{version(name)}', and rank 1 {name} '1.0'", "the same program and"
    check_all(ended, "UnsupportedValueError", *texts)


def test_the_versions_of_d2ldev_of_the_framework_and_of_python_are_compared(reference):
    names = "d2ldev", "array-api-strict", "numpy"
    others = {"backend": "reference", "python": platform.python_version()}
    assert (
        list_versions(framework_of(reference)) == {name: version(name) for name in names} | others
    )


def test_data_that_ends_early_is_an_error_of_all_where_an_engine_waits_at_the_end_of_an_epoch():
    def body(rank):
        ReferenceGroupLearner.flush = lambda learner: time.sleep(rank * LIMIT)
        return fit(data=batches()[: 4 - rank])

    for each in together(body, timeout=TIMEOUT):
        assert each.status == 1
        assert "UnsupportedValueError" in each.error + each.text
        assert "batch 3 of epoch 0" in each.text
        assert each.seconds < SOON


def test_a_process_that_resumes_differs_from_one_that_does_not(tmp_path):
    def body(rank):
        return fit(checkpoint=tmp_path / "run", resume=rank == 1)

    check_all(together(body, timeout=TIMEOUT), "UnsupportedValueError", "they do not do the same")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["data", "callbacks", "metrics"])
def test_an_error_in_one_process_is_named_by_the_others(what, rank):
    raising = Raising()

    def metric(prediction, y):
        return 0 if os.environ["RANK"] != str(rank) else raising() or 0

    def body(here):
        if what == "metrics":
            return fit(metrics=[metric])
        return fit(**({what: raising} if here == rank else {}))

    ended = together(body, 3, timeout=TIMEOUT)
    assert (ended[rank].error, ended[rank].text) == ("ValueError", "mine")
    others = [each for number, each in enumerate(ended) if number != rank]
    check_all(others, "PeerLostError", f"rank {rank} on", "it ended with ValueError: mine")
    assert ended[rank].seconds < SOON


def test_an_error_in_all_processes_is_raised_in_each():
    ended = together(lambda rank: fit(data=Raising()), timeout=TIMEOUT)
    assert "ValueError" in {each.error for each in ended}
    assert {each.error for each in ended} <= {"ValueError", "PeerLostError"}
    assert all("mine" in each.text and each.seconds < SOON for each in ended)


def test_a_batch_without_examples_is_an_error_of_all():
    ended = together(lambda rank: fit(data=Empty()), timeout=TIMEOUT)
    check_all(ended, "UnsupportedValueError", "it has no examples")


@pytest.mark.parametrize("make", [list, lambda: iter([])], ids=["a list", "an iterator"])
def test_data_without_batches_is_an_error_of_all(make):
    """Of each its own, or what it was told of the first."""
    ended = together(lambda rank: fit(data=make()), timeout=TIMEOUT)
    assert {each.error for each in ended} <= {"UnsupportedValueError", "PeerLostError"}
    assert all("UnsupportedValueError" in each.error + each.text for each in ended), ended
    assert all(each.seconds < SOON for each in ended)


def test_two_gpus_in_a_process_of_a_launch_are_an_error_of_all():
    ended = together(lambda rank: fit(num_gpus=2), timeout=TIMEOUT)
    check_all(ended, "UnsupportedValueError", "this process is one of 2, and each has one GPU")


def test_more_processes_than_gpus_are_an_error_of_those_without():
    def body(rank):
        join.PATIENCE = 1
        return fit(num_gpus=1)

    ended = together(body, 3, timeout=1)
    check_all(ended[:2], "PeerLostError", "these have not come: 2")
    assert ended[2].error == "DeviceUnavailableError"
    assert "d2ldev launch --processes 2" in ended[2].text


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "2"}, "from RANK): '2' is not an integer from 0 to 1"),
        ({"RANK": "-1"}, "'-1' is not an integer"),
        ({"RANK": None}, "from RANK): it is not set"),
        ({"WORLD_SIZE": None}, "from WORLD_SIZE): it is not set"),
        ({"WORLD_SIZE": "two"}, "'two' is not an integer"),
        ({"WORLD_SIZE": "9" * 5000}, "is not an integer from 1"),
        ({"WORLD_SIZE": "0"}, "'0' is not an integer"),
        ({"LOCAL_RANK": "5"}, "from LOCAL_RANK)"),
        ({"LOCAL_WORLD_SIZE": "3"}, "from LOCAL_WORLD_SIZE)"),
        ({"MASTER_ADDR": None}, "from MASTER_ADDR): it is not set"),
        ({"MASTER_PORT": None}, "from MASTER_PORT): it is not set"),
        ({"MASTER_PORT": "http"}, "'http' is not an integer from 1 to 65534"),
        ({"MASTER_PORT": "70000"}, "'70000' is not an integer"),
        ({"D2LDEV_PEER_TIMEOUT": "soon"}, "it must be a number of seconds from 1 to 86400"),
        ({"D2LDEV_PEER_TIMEOUT": "nan"}, "it must be a number of seconds from 1 to 86400"),
        ({"D2LDEV_PEER_TIMEOUT": "0"}, "it must be a number of seconds from 1 to 86400"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variables, text):
    ended = together(lambda rank: fit(), 1, others={0: {"WORLD_SIZE": "2", **variables}})
    check_all(ended, "UnsupportedValueError", text)


@pytest.mark.parametrize("size", ["1", "", None])
def test_a_launch_of_one_process_makes_no_group(size):
    variables = {"WORLD_SIZE": size, "RANK": size and "0", "MASTER_ADDR": None}
    (ended,) = together(lambda rank: (fit(), join.find_group()), 1, others={0: variables})
    assert ended.error == "", ended
    assert ended.value[1] is None


def test_a_launcher_may_leave_out_how_many_there_are_on_a_machine():
    without = {rank: {"LOCAL_WORLD_SIZE": None} for rank in range(2)}
    ended = together(lambda rank: fit(), others=without)
    assert [each.error for each in ended] == ["", ""], ended


@pytest.mark.parametrize("early", [0, 1])
def test_a_process_that_ends_before_the_other_is_named(early):
    ended = together(lambda rank: (fit(), None if rank == early else fit()), timeout=TIMEOUT)
    assert ended[early].error == ""
    late = 1 - early
    told = f"rank {early} has ended, and rank {late} is at"
    check_all([ended[late]], "UnsupportedValueError", told)


def test_one_fit_after_the_other_and_a_fit_in_a_thread():
    def body(rank):
        found = [fit(), fit(epochs=1)]
        thread = threading.Thread(target=lambda: found.append(fit()))
        thread.start()
        thread.join()
        return found

    first, second = together(body)
    assert first.error == "", first
    assert first.value == second.value
    assert first.value[0] == first.value[2] != first.value[1]


def test_a_slow_rank_is_not_lost():
    def callback(epoch, history):
        time.sleep(3 if epoch == 0 and os.environ["RANK"] == "1" else 0)

    ended = together(lambda rank: fit(callbacks=callback), timeout=1)
    assert [each.error for each in ended] == ["", ""], ended


def test_two_backends_in_one_launch_are_an_error(other):
    def body(rank):
        fit()
        backend = d2ldev.Backend(type(framework_of(other))(virtual_gpus=1))
        framework_of(backend).name = "another"
        Trainer(1, backend=backend).fit(backend.mlp([4, 3]), batches(), loss="cross_entropy")

    ended = together(body, timeout=TIMEOUT)
    check_all(ended, "UnsupportedValueError", "one backend in each launch")


def test_a_program_that_catches_the_error_goes_on_without_the_others():
    """What it has learned is its own; it may use it, but not train together again."""

    def body(rank):
        if rank == 1:
            fit()
            os._exit(3)
        trained = fit()
        errors = []
        for _ in range(2):
            try:
                fit()
            except d2ldev.PeerLostError as error:
                errors.append(str(error))
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        return errors, trained, fit()

    first, second = together(body, timeout=TIMEOUT)
    assert second.status == 3
    errors, trained, trained_alone = first.value
    assert len(errors) == 2
    assert all("rank 1 on" in error for error in errors)
    assert trained == pytest.approx(trained_alone, rel=1e-5)
    assert first.seconds < SOON


def test_ctrl_c_on_one_rank_ends_all():
    def callback(epoch, history):
        if epoch == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    first, second = together(lambda rank: fit(epochs=3, callbacks=callback), timeout=TIMEOUT)
    assert second.error == "KeyboardInterrupt"
    check_all([first], "PeerLostError", "it ended with KeyboardInterrupt")


def test_an_exit_in_a_callback_of_one_rank_ends_all():
    def callback(epoch, history):
        if os.environ["RANK"] == "0":
            sys.exit(5)

    first, second = together(lambda rank: fit(callbacks=callback), timeout=TIMEOUT)
    assert first.error == "SystemExit"
    check_all([second], "PeerLostError", "it ended with SystemExit: 5")


def test_the_error_survives_pickling():
    error = d2ldev.PeerLostError("train", "rank 1 is lost", "start again", ["cpu"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (d2ldev.PeerLostError, str(error))
