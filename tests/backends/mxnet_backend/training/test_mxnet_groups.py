"""What this process does for the others: statistics at the end of an epoch, and lost servers."""

import atexit
import os
import threading
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from d2ldev_mxnet import parallel, servers
from process_runs import initialise_all, mlp, normalize

from d2ldev.framework import TrainingSettings
from d2ldev.framework.testing import framework_of

pytestmark = pytest.mark.usefixtures("set_np")


class FirstProcess:
    """Servers that give arrays the values of a first process, which are all 7."""

    def __init__(self):
        self.shapes = []

    def spread(self, arrays):
        self.shapes.append([x.shape for x in arrays])
        for x in arrays:
            x[()] = 7


@pytest.fixture
def first(monkeypatch):
    found = FirstProcess()
    monkeypatch.setattr(parallel, "servers_of", lambda group: found)
    return found


def learner_of(backend, net):
    group = SimpleNamespace(size=2, rank=1)
    settings = TrainingSettings(loss="cross_entropy", optimizer="sgd")
    return framework_of(backend).parallel.learner_of_group(net, settings, group)


def test_the_end_of_an_epoch_brings_the_running_statistics_of_the_first(backend, first):
    net = normalize()
    before = net[1].weight.data().asnumpy()
    learner_of(backend, net).flush()
    assert first.shapes == [[net[0].running_mean.shape, net[0].running_var.shape]]
    for statistic in (net[0].running_mean, net[0].running_var):
        np.testing.assert_array_equal(statistic.data().asnumpy(), 7)
    np.testing.assert_array_equal(net[1].weight.data().asnumpy(), before)


def test_a_model_without_statistics_gets_none_at_the_end_of_an_epoch(backend, first):
    learner_of(backend, mlp()).flush()
    assert first.shapes == [[]]


def test_statistics_without_shapes_are_left_out_at_the_end_of_an_epoch(backend, first):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dense(3))
    learner_of(backend, initialise_all(net)).flush()
    assert first.shapes == [[]]


class Problems:
    """A group of one process, which notes why it was given up."""

    rank = local_rank = 0
    size = 1
    addresses = ("127.0.0.1:29500",)

    def __init__(self):
        self.problems, self.both = [], threading.Event()

    def gather(self, label, value):
        return [value]

    def give_up(self, problem):
        self.problems.append(problem)
        if len(self.problems) == 2:
            self.both.set()


def test_a_group_is_given_up_when_a_server_or_the_scheduler_ends(monkeypatch):
    serving = "import os; raise SystemExit({'scheduler': 3, 'server': 4}[os.environ['DMLC_ROLE']])"
    monkeypatch.setattr(servers, "_SERVING", serving)
    monkeypatch.setattr(servers, "_make", lambda variables: None)
    monkeypatch.setattr(atexit, "register", lambda call: None)  # there is no store to be closed
    of_forks = []
    monkeypatch.setattr(
        os, "register_at_fork", lambda after_in_child: of_forks.append(after_in_child)
    )
    group = Problems()
    servers.Servers(group)
    assert group.both.wait(60)
    (close_pipes,) = of_forks
    close_pipes()
    assert sorted(group.problems) == [
        "MXNet's scheduler has ended with status 3",
        "MXNet's server has ended with status 4",
    ]
