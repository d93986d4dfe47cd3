"""The exercises: what they refuse to show, and the reasons of rows without figures."""

import pytest
from reference_backend import ReferenceFramework

import d2ldev
from d2ldev import OutOfDeviceMemoryError, gpu
from d2ldev.bench import exercises, limits
from d2ldev.bench.exercises import EXERCISES
from d2ldev.bench.results import Figures, Row
from d2ldev.framework import CPU, nvml
from d2ldev.framework.testing import framework_of


@pytest.fixture
def backend():
    return d2ldev.Backend(ReferenceFramework(virtual_gpus=1))


def run(name, backend, size=None):
    exercise = EXERCISES[name]
    return exercise.run(backend, size or exercise.small, seconds=0)


def test_a_wrong_result_is_an_error_without_figures(backend, monkeypatch):
    to_numpy = framework_of(backend).tensors.to_numpy
    monkeypatch.setattr(framework_of(backend).tensors, "to_numpy", lambda x: to_numpy(x) + 1)
    result = run("matmul", backend)
    assert "time a product: its result is wrong by" in result.error
    assert result.rows == []


def test_a_result_on_another_device_is_an_error_without_figures(backend, monkeypatch):
    monkeypatch.setattr(backend, "device_of", lambda x: CPU)
    result = run("matmul", backend)
    assert "cannot time a product on gpu:0: the result is on cpu" in result.error
    assert {row.device for row in result.rows} == {"cpu"}


def test_other_norms_than_those_of_the_products_are_an_error(backend, monkeypatch):
    norm = framework_of(backend).tensors.norm
    monkeypatch.setattr(framework_of(backend).tensors, "norm", lambda x: norm(x) * 2)
    assert (
        "log norms a list with one transfer: its result is wrong by 1 of its norm"
        in run("log", backend).error
    )


@pytest.mark.parametrize(
    ("name", "transfers"),
    [
        ("numpy", {"NumPy in the loop": 5, "one transfer at the end": 1}),
        (
            "log",
            {
                "a list with one transfer": 1,
                "a DeviceLog with one transfer": 1,
                "one at a time": 5,
            },
        ),
    ],
)
def test_values_copied_together_are_one_transfer(backend, monkeypatch, name, transfers):
    tensors = framework_of(backend).tensors
    made, counts, to_numpy, timeit = [], [], tensors.to_numpy, backend.timeit

    def count_calls(call, *args, **options):
        made.clear()
        call(*args)
        counts.append(len(made))
        return timeit(call, *args, **options)

    monkeypatch.setattr(tensors, "to_numpy", lambda x: made.append(x) or to_numpy(x))
    monkeypatch.setattr(backend, "timeit", count_calls)
    rows = run(name, backend, 5).rows
    assert [(row.way, count) for row, count in zip(rows, counts, strict=True)] == [
        *transfers.items(),
        *transfers.items(),
    ]


def test_an_error_of_the_framework_is_in_the_result_with_the_rows_before_it(backend, monkeypatch):
    def fail(obj, path):
        raise RuntimeError("no such engine")

    monkeypatch.setattr(backend, "load_into", fail)
    result = run("parameters", backend)
    assert result.error == "RuntimeError: no such engine"
    assert [row.way for row in result.rows] == ["save", "load"]


@pytest.mark.parametrize(
    ("largest", "sizes"), [(64, (16, 32, 64)), (70, (16, 32, 64, 70))], ids=["power", "between"]
)
def test_products_are_of_powers_of_2_and_of_the_size(backend, largest, sizes):
    rows = run("matmul", backend, largest).rows
    assert [(row.device, row.size) for row in rows] == [
        (device, size) for device in ("cpu", "gpu:0") for size in sizes
    ]


def test_a_size_below_the_first_one_is_measured_alone(backend):
    assert [row.size for row in run("matmul", backend, 3).rows] == [3, 3]


def test_a_product_that_would_take_too_long_is_left_out_with_its_reason(backend, monkeypatch):
    monkeypatch.setattr(exercises, "_LONGEST", 0)
    _, second = run("matmul", backend).rows[:2]
    assert (second.size, second.figures) == (32, None)
    assert second.note.startswith("left out: a product would take about ")


def test_a_product_for_which_the_memory_is_too_small_says_so(backend, monkeypatch):
    def fail(shape, **options):
        raise OutOfDeviceMemoryError("make a tensor", "there are 3 bytes", "a smaller one")

    monkeypatch.setattr(backend, "randn", fail)
    result = run("matmul", backend, 16)
    assert result.error is None
    assert {row.note for row in result.rows} == {
        "OutOfDeviceMemoryError: cannot make a tensor: there are 3 bytes"
    }


@pytest.mark.parametrize("name", ["copies", "operands"])
def test_without_a_gpu_the_rows_say_that_they_need_one(name):
    rows = run(name, d2ldev.Backend(ReferenceFramework(virtual_gpus=0))).rows
    assert {(row.note, row.figures) for row in rows} == {
        ("needs a GPU: reference has none here", None)
    }


def test_with_one_gpu_the_rows_of_two_say_that_they_need_two(backend):
    rows = run("two-gpus", backend).rows
    assert {(row.note, row.figures) for row in rows} == {
        ("needs two GPUs: reference has 1 here", None)
    }


def test_an_operand_that_the_framework_refuses_to_move_has_its_words(backend):
    refused = run("operands", backend).rows[-1]
    assert refused.figures is None
    assert refused.note.startswith("reference refuses it: ValueError: ")


def test_the_rate_is_the_work_by_the_median(backend):
    row = run("matmul", backend, 16).rows[0]
    assert row.figures.rate == pytest.approx(2 * 16**3 / 1e9 / row.figures.seconds)


def test_parameters_have_the_requested_size(backend):
    save = run("parameters", backend, 2).rows[0]
    assert save.figures.rate * save.figures.seconds == pytest.approx(2, rel=0.01)


def test_the_device_of_a_row_is_virtual_where_the_backends_is(backend):
    platforms = {row.device: row.platform for row in run("numpy", backend).rows}
    assert platforms == {"cpu": "cpu", "gpu:0": backend.platform(gpu())}


# -- figures that the hardware cannot reach -------------------------------------------------------


@pytest.fixture
def keeping(backend, monkeypatch):
    """A backend whose second copy of a tensor is none, as TensorFlow's ``tf.identity`` has it."""
    kept, transfer = {}, framework_of(backend).tensors.transfer

    def keep(xs, native, **_):
        for x in xs:
            if (id(x), native) not in kept:
                kept[id(x), native] = x, transfer([x], native, copy=True)[0]
        return [kept[id(x), native][1] for x in xs]

    monkeypatch.setattr(framework_of(backend).tensors, "transfer", keep)
    return backend


def test_a_copy_that_shares_memory_is_refused_on_a_virtual_gpu(keeping):
    result = run("copies", keeping, 1000)
    one = result.rows[1]
    assert (one.way, one.figures) == ("one copy", None)
    assert one.note.startswith("refused: ")
    assert "GB/s is more than the" in one.note
    assert one.note.endswith(f"{limits.count_cores()} cores, measured")


def test_a_copy_is_shown(backend):
    one = run("copies", backend, 1000).rows[1]
    assert one.figures is not None
    assert one.note == ""


def row(seconds, platform="cuda"):
    return Row("a copy", "gpu:0", platform, None, Figures(seconds, seconds, seconds, 64 / seconds))


@pytest.mark.parametrize(
    ("seconds", "bandwidth", "reason"),
    [
        # As it was measured on an H200, before copies were copies.
        (
            33e-6,
            (4.9e12, 64e9),
            "1,939 GB/s is more than the 64 GB/s of its link to the host",
        ),
        (33e-6, (1e12, None), "1,939 GB/s is more than the 1,000 GB/s of its memory"),
        (33e-6, (4.9e12, None), ""),
        (33e-6, (None, None), ""),
        (1.2e-3, (4.9e12, 64e9), ""),
    ],
    ids=repr,
)
def test_a_copy_to_a_gpu_is_no_faster_than_its_memory_and_its_link(
    monkeypatch, seconds, bandwidth, reason
):
    monkeypatch.setattr(limits.nvml, "bandwidth_of", lambda index: nvml.Bandwidth(*bandwidth))
    found = limits.verify_rate(row(seconds), gpu(0), 64_000_000)
    assert found.note == (f"refused: {reason}" if reason else "")
    assert (found.figures is None) == bool(reason)


def test_limits_are_known_only_for_nvidias_gpus():
    measured = row(1e-9, "mps")
    assert limits.verify_rate(measured, gpu(0), 64_000_000) is measured


def test_a_row_has_the_precision_that_was_in_force(backend, monkeypatch):
    asked = []
    monkeypatch.setattr(framework_of(backend).devices, "matmul_precision", lambda: "high")
    monkeypatch.setattr(
        framework_of(backend).devices,
        "set_matmul_precision",
        lambda precision: asked.append(precision) or (lambda: asked.append("before")),
    )
    result = run("matmul", backend, 16)
    assert {row.precision for row in result.rows} == {"high"}
    assert asked == ["highest", "before"]


@pytest.mark.parametrize(("precision", "is_refused"), [("highest", True), ("high", False)])
def test_a_product_with_ten_bits_is_not_float32(backend, monkeypatch, precision, is_refused):
    randn, to_numpy = backend.randn, framework_of(backend).tensors.to_numpy
    made = []
    monkeypatch.setattr(backend, "randn", lambda *a, **o: made.append(randn(*a, **o)) or made[-1])

    def round_off(x):
        values = to_numpy(x)
        is_product = not any(x is each for each in made)
        return values * (1 + 3e-4) if is_product else values

    monkeypatch.setattr(framework_of(backend).tensors, "to_numpy", round_off)
    monkeypatch.setattr(framework_of(backend).devices, "matmul_precision", lambda: precision)
    assert (run("matmul", backend, 64).error is not None) is is_refused


def test_an_unsupported_precision_is_an_error_of_the_exercise(backend, monkeypatch):
    monkeypatch.setattr(ReferenceFramework, "cannot", {"multiply in float32": "ten bits"})
    result = run("matmul", backend)
    assert result.rows == []
    assert "cannot measure matmul: the reference backend cannot multiply in float32" in result.error
    assert "fix: --matmul-precision high" in result.error
