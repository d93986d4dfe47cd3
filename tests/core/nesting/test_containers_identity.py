"""What did not move comes back as itself, what was one object stays one, inputs do not change."""

from d2ldev import Broadcast
from d2ldev.framework import unwrap_broadcasts
from d2ldev.framework.testing import framework_of

# -- ties -------------------------------------------------------------------------------------


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
