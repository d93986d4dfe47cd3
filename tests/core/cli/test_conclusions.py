"""What follows from figures: each sentence with figures that were made up for it, on both sides."""

from dataclasses import replace

import pytest

from d2ldev.bench.conclusions import number, of_backends, of_logs, of_products, of_rates, of_ways
from d2ldev.bench.exercises import EXERCISES
from d2ldev.bench.results import Figures, Result, Row


def products(device, seconds, platform="cuda"):
    """Rows of products from 16 x 16 up, each of which takes so long and has a rate of 3 / it."""
    return [
        Row("", device, platform, 16 * 2**i, Figures(each, each, each, 3 / each))
        for i, each in enumerate(seconds)
    ]


def ways(*seconds, device="gpu:0", platform="cuda", spread=0.0):
    return [
        Row(f"way {i}", device, platform, None, Figures(each, each - spread, each + spread, 8.0))
        for i, each in enumerate(seconds, 1)
    ]


@pytest.mark.parametrize(
    ("on_gpu", "said"),
    [
        ([9.0, 4.0, 1.0], "From 64 x 64 on, gpu:0 is faster than the CPU"),
        ([1.0, 1.0, 1.0], "From 16 x 16, the smallest size, on, gpu:0 is faster than the CPU"),
        ([9.0, 9.0, 9.0], "Up to 64 x 64, gpu:0 is not faster than the CPU"),
        # Once faster and then slower again is no crossover.
        ([9.0, 1.0, 9.0], "Up to 64 x 64, gpu:0 is not faster than the CPU"),
        ([], "There is no real GPU to compare the CPU with"),
    ],
)
def test_the_crossover_is_the_size_from_which_on_the_gpu_stays_faster(on_gpu, said):
    rows = [*products("cpu", [2.0, 3.0, 4.0], "cpu"), *products("gpu:0", on_gpu)]
    assert of_products(rows).partition(";")[0] == said


def test_the_best_rate_of_each_device_is_named():
    rows = [*products("cpu", [2.0, 3.0], "cpu"), *products("gpu:0", [0.5, 1.0])]
    assert of_products(rows).endswith("; the best rate is 1.5 GFLOP/s on cpu, 6 GFLOP/s on gpu:0.")


def test_sizes_that_only_one_of_both_has_are_not_compared():
    rows = [*products("cpu", [2.0], "cpu"), *products("gpu:0", [1.0, 1.0])[1:]]
    assert of_products(rows).startswith("No size was measured on both gpu:0 and the CPU; ")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (6.0, 2.0, "way 2 is 3 times as fast as way 1"),
        (2.0, 5.0, "way 2 is 2.5 times as slow as way 1"),
        (2.0, 1.95, "way 2 is as fast as way 1"),
    ],
)
def test_two_ways_are_compared_by_their_times(before, after, said):
    assert of_ways(ways(before, after)) == f"On gpu:0, {said}."


@pytest.mark.parametrize("seconds", [(6.0, 2.0), (2.0, 6.0)])
def test_ways_of_which_the_quartiles_overlap_are_the_same(seconds):
    assert of_ways(ways(*seconds, spread=2.5)) == "On gpu:0, way 2 is as fast as way 1."


@pytest.mark.parametrize(("log", "said"), [(2.2, "met"), (1.9, "met"), (2.21, "missed")])
@pytest.mark.parametrize(("device", "platform"), [("cpu", "cpu"), ("gpu:0", "cuda")])
def test_a_log_is_compared_with_the_least_that_it_can_cost(log, said, device, platform):
    found = EXERCISES["log"].conclude(ways(2.0, log, 5.0, device=device, platform=platform))
    share = f"way 2 takes {number(log / 2)} of the time of way 1"
    assert found == f"On {device}, {share} (the aim, at most 1.1, is {said}), way 3 2.5."


@pytest.mark.parametrize("number_of_ways", [1, 2])
def test_a_log_that_ended_early_says_what_was_measured(number_of_ways):
    found = EXERCISES["log"].conclude(ways(*[2.0] * number_of_ways))
    assert ("way 2 takes 1 of" in found) == (number_of_ways == 2)


def test_three_ways_on_two_devices_are_each_compared_with_the_first_one_there():
    found = of_ways([*ways(1.0, 2.0, 4.0), *ways(1.0, 3.0, device="gpu:1")])
    assert found == (
        "On gpu:0, way 2 is 2 times as slow as way 1; on gpu:0, way 3 is 4 times as slow as way 1;"
        " on gpu:1, way 2 is 3 times as slow as way 1."
    )


def test_rates_are_those_of_the_rows():
    assert of_rates(ways(1.0, 2.0)) == "On gpu:0, way 1 moves 8 MB/s, way 2 moves 8 MB/s."


@pytest.mark.parametrize("conclude", [of_products, of_ways, of_logs, of_rates])
def test_nothing_is_said_of_a_gpu_that_is_virtual(conclude):
    sentence = conclude([*products("gpu:0", [2.0, 1.0], "virtual")])
    assert "othing about a GPU follows from what is virtual here (gpu:0)." in sentence
    assert "times" not in sentence
    assert "moves" not in sentence
    assert "faster" not in sentence


@pytest.mark.parametrize("conclude", [of_ways, of_logs, of_rates])
def test_rows_without_figures_lead_to_nothing(conclude):
    rows = [Row("way", "gpu:0", "-", note="needs a GPU")]
    assert conclude(rows) == "Nothing was compared here, and nothing follows."


def rated(backend, rate, *, spread=0.0, seconds=1.0, **where):
    """A result whose best rate is this one, which a slower row comes before."""
    where = {"device": "cpu", "platform": "cpu"} | where
    figures = Figures(seconds, seconds * (1 - spread), seconds * (1 + spread), rate)
    slow = Figures(1.0, 1.0, 1.0, rate / 2)
    rows = [Row("slow", **where, figures=slow), Row("fast", **where, figures=figures)]
    return Result("log", backend, "", "", rows)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            [rated("a", 2.0), rated("b", 8.0), rated("c", 4.0)],
            "At its best on cpu, b is 2 times as fast as c and 4 times as fast as a.",
        ),
        # Work of another size takes another time.
        (
            [rated("a", 2.0, seconds=9.0), rated("b", 6.0)],
            "At its best on cpu, b is 3 times as fast as a.",
        ),
        (
            [rated("a", 2.0, spread=0.2), rated("b", 2.5, spread=0.2)],
            "At its best on cpu, b is as fast as a.",
        ),
        (
            [rated("a", 1.0, device="gpu:0", platform=x) for x in ("virtual", "cuda")],
            "",
        ),
        ([rated("a", 1.0)], ""),
        ([rated("a", 1.0), replace(rated("b", 2.0), error="cannot go on")], ""),
    ],
    ids=["three", "another size", "the quartiles overlap", "virtual", "one", "an error"],
)
def test_backends_are_compared_by_their_best_rates_on_hardware(results, said):
    assert of_backends(results) == said


def in_precision(backend, seconds, precision):
    rows = [replace(row, precision=precision) for row in products("gpu:0", [seconds])]
    return Result("matmul", backend, "", "", rows)


def test_only_what_multiplied_in_the_same_precision_is_compared():
    results = [in_precision("torch", 6.0, "highest"), in_precision("tensorflow", 1.0, "high")]
    assert of_backends(results) == ""
    results += [in_precision("jax", 3.0, "highest")]
    assert of_backends(results) == (
        "At its best on gpu:0 with products in 'highest', jax is 2 times as fast as torch."
    )
