"""What processes that train together share: sums, random numbers, and what rank 0 knows."""

import os
import random
import tempfile

import numpy as np
from launched import together

import d2ldev
from d2ldev import ArrayLoader, DeviceLog
from d2ldev.distributed.membership import join_group
from d2ldev.files.load import from_bytes
from d2ldev.files.save import to_bytes
from d2ldev.framework import CPU
from d2ldev.framework.testing import framework_of
from d2ldev.training.team import ProcessGroup, Team


def team():
    framework = framework_of(d2ldev.get_backend("reference"))
    return ProcessGroup(framework, join_group(framework))


def log_of(rank):
    log = DeviceLog(d2ldev.get_backend("reference"), values=False)
    log.add(rank + 1, loss=2.0 * rank, only=1.0)
    return log


def test_a_group_says_for_itself_all_that_a_team_of_one_says():
    public = {name for name in vars(Team) if not name.startswith("_")}
    assert public <= {*vars(ProcessGroup), "is_first", "has_failed"}


def test_means_are_over_the_examples_of_all():
    found = together(lambda rank: team().means(log_of(rank)), 3)
    # Of 0, 2 and 4, with the weights 1, 2 and 3.
    assert [each.value for each in found] == [{"loss": 16 / 6, "only": 1.0}] * 3


def test_a_process_without_examples_adds_nothing_to_a_mean():
    def body(rank):
        log = DeviceLog(d2ldev.get_backend("reference"), values=False)
        log.add(0 if rank else 4, loss=float("nan") if rank else 3.0)
        return team().means(log)

    assert [each.value for each in together(body)] == [{"loss": 3.0}] * 2


def test_the_state_of_a_log_has_the_sums_of_all():
    states = [each.value for each in together(lambda rank: team().log_state(log_of(rank)))]
    assert [state["totals"] for state in states] == [{"loss": [4.0, 3.0], "only": [3.0, 3.0]}] * 2
    assert states[0]["last"] == {"loss": 0.0, "only": 1.0}


def test_a_process_alone_has_its_own_state_of_a_log():
    assert Team().log_state(log_of(1)) == log_of(1).state_dict()


def test_an_epoch_begins_with_the_random_numbers_of_rank_0():
    def body(rank):
        backend = d2ldev.get_backend("reference")
        random.seed(rank)
        np.random.seed(rank)
        backend.seed(rank)
        team().begin_epoch(0, CPU)
        return random.random(), np.random.rand()

    first, second, third = together(body, 3)
    assert first.error == "", first
    assert first.value == second.value == third.value
    random.seed(0)
    np.random.seed(0)
    assert first.value == (random.random(), np.random.rand())


def test_an_epoch_begins_with_the_orders_of_rank_0():
    def body(rank):
        loaders = [ArrayLoader(np.arange(2), batch_size=1, shuffle=True, seed=None) for _ in "ab"]
        for _ in range(rank):
            list(loaders[0])
        team().begin_epoch(0, CPU, loaders)
        return [loader.state_dict() for loader in loaders]

    first, second, third = together(body, 3)
    assert first.error == "", first
    assert first.value == second.value == third.value
    assert [state["epoch"] for state in first.value] == [0, 0]


def test_the_order_of_an_array_loader_is_not_given_to_other_data():
    def body(rank):
        loaders = [ArrayLoader(np.arange(2), batch_size=1, seed=1), [np.arange(2)]]
        team().begin_epoch(0, CPU, loaders if rank == 0 else loaders[::-1])
        return loaders[0].state_dict()

    assert [each.value for each in together(body)] == [{"seed": 1, "epoch": 0}] * 2


def test_rank_0_shares_its_value_with_all():
    found = together(lambda rank: team().broadcast_from_first("a question", f"of rank {rank}"))
    assert [each.value for each in found] == ["of rank 0"] * 2


def test_objects_sent_to_another_process_arrive_and_leave_no_file(reference, monkeypatch):
    named = []
    monkeypatch.setattr(os, "rename", named.append)
    monkeypatch.setattr(os, "replace", named.append)
    state = {"numbers": np.arange(5), "pair": (1, [2.5, None, "text"]), "x": reference.ones((2, 3))}
    found = from_bytes(framework_of(reference), to_bytes(framework_of(reference), state))
    assert found["pair"] == (1, [2.5, None, "text"])
    np.testing.assert_array_equal(found["numbers"], np.arange(5))
    np.testing.assert_array_equal(reference.to_numpy(found["x"]), np.ones((2, 3)))
    assert named == os.listdir(tempfile.gettempdir()) == []
