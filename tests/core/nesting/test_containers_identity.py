"""What did not move comes back as itself, what was one object stays one, inputs do not change."""

from d2ldev import Broadcast, cpu, gpu
from d2ldev.framework import unwrap_broadcasts
from d2ldev.framework.testing import framework_of


def test_a_nesting_in_which_nothing_moved_is_itself(reference, x):
    batch = {"a": [x, (x,)], "b": None}
    assert reference.to(batch, cpu()) is batch


def test_an_inner_container_in_which_nothing_moved_is_itself(reference, x):
    there = {"x": reference.to(x, gpu(0))}
    new = reference.to([there, x], gpu(0))
    assert new[0] is there


def test_a_tensor_that_is_there_already_is_itself(reference, x):
    there = reference.to(x, gpu(0))
    assert reference.to([x, there], gpu(0))[1] is there


def test_copy_makes_new_containers_too(reference, x):
    batch = {"a": [x]}
    new = reference.copy(batch)
    assert new is not batch
    assert new["a"] is not batch["a"]
    assert new["a"][0] is not x


def test_arguments_are_not_changed(moved, x):
    inner = [x]
    batch = {"a": x, "inner": inner}
    moved(batch)
    assert inner[0] is x
    assert batch["a"] is x
    assert batch["inner"] is inner


# -- ties -------------------------------------------------------------------------------------


def test_a_tensor_that_is_in_two_places_is_moved_once(moved, x):
    new = moved({"a": x, "b": [x]})
    assert new["a"] is new["b"][0]


def test_a_list_in_two_places_is_rebuilt_once(moved, x):
    inner = [x]
    new = moved((inner, {"again": inner}))
    assert new[0] is new[1]["again"]


def test_equal_tensors_that_are_not_one_object_stay_two(reference, moved, x):
    new = moved([x, reference.copy(x)])
    assert new[0] is not new[1]


def test_a_copy_keeps_ties(reference, x):
    new = reference.copy([x, x])
    assert new[0] is new[1]


def test_a_nesting_full_of_shared_lists_takes_no_exponential_time(reference):
    batch = [reference.ones(1)]
    for _ in range(60):  # 2**60 paths to one tensor
        batch = [batch, batch]
    assert reference.to(batch, "cpu") is batch
    moved = reference.to(batch, "gpu:0")
    assert moved[0] is moved[1]
    assert reference.to(moved, "gpu:0") is moved


def test_a_list_in_two_places_stays_one_list_without_its_broadcasts(reference):
    batch = [Broadcast("all")]
    for _ in range(60):  # 2**60 paths to one mark
        batch = [batch, batch]
    first, again = unwrap_broadcasts(batch, framework_of(reference).state.kinds)
    assert first is again
    while isinstance(first, list):
        first = first[0]
    assert first == "all"
