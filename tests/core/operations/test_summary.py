"""``show`` and ``summarize``: the table of a model, in a terminal and in a notebook."""

import pickle

import pytest

from d2ldev import UnsupportedValueError, gpu
from d2ldev.framework import CPU
from d2ldev.operations.summary import ModuleSize
from d2ldev.results import Summary

LAYER = ModuleSize("<0>", "Linear", 600, 500, 7, {"float32": 2400, "int64": 56}, (CPU, gpu(1)))


def test_the_table_has_a_row_for_each_module_and_one_for_all(reference):
    net = reference.mlp([2, 3, 1], device="gpu:1")
    assert repr(reference.summarize(net)).splitlines() == [
        "module    class  parameters  trained  buffers       MB  dtype    device",
        "layers.0                  9        9        0  < 0.001  float32  gpu:1",
        "layers.1                  4        4        0  < 0.001  float32  gpu:1",
        "          total          13       13        0  < 0.001  float32  gpu:1",
    ]


def test_the_total_is_the_sum_of_the_modules():
    total = Summary([LAYER, LAYER._replace(devices=(gpu(0),))]).total
    assert total[2:] == (1200, 1000, 14, {"float32": 4800, "int64": 112}, (CPU, gpu(0), gpu(1)))


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0"), (4, "< 0.001"), (1500, "0.0015"), (12_345_678, "12.3"), (1_234_567_890, "1,235")],
)
def test_bytes_are_shown_in_millions(nbytes, shown):
    (row, _) = repr(Summary([LAYER._replace(nbytes={"int8": nbytes})])).splitlines()[1:]
    assert f"  {shown}  int8" in row


def test_several_dtypes_are_listed_with_their_bytes():
    assert "float32 0.0024 MB, int64 < 0.001 MB" in repr(Summary([LAYER]))


def test_at_most_eight_notes_are_shown():
    lines = repr(Summary([LAYER], [f"note {number}" for number in range(10)])).splitlines()
    assert lines[-2:] == ["note 7", "and 2 more"]


def test_html_has_the_same_words_escaped():
    summary = Summary([LAYER], ["<1> is <0>, and counts once"])
    shown = summary._repr_html_()
    assert "&lt;0&gt;" in shown
    assert "&lt;1&gt; is &lt;0&gt;, and counts once" in shown
    assert "<0>" not in shown
    for word in ("Linear", "600", "500", "float32, int64", "cpu, gpu:1", "0.00246"):
        assert f">{word}</td>" in shown


def test_a_summary_is_pickled():
    summary = Summary([LAYER], ["a note"])
    assert repr(pickle.loads(pickle.dumps(summary))) == repr(summary)


def test_a_tensor_in_two_places_of_a_pytree_counts_once(reference):
    weight = reference.ones((2, 2))
    summary = reference.summarize({"encoder": {"weight": weight}, "decoder": {"weight": weight}})
    assert summary.total.parameters == 4
    assert summary.notes == ("decoder.weight is encoder.weight, and counts once",)


def test_integers_of_a_pytree_are_buffers(reference):
    total = reference.summarize([reference.ones(3), reference.ones(2, dtype="int64")]).total
    assert (total.parameters, total.trained, total.buffers) == (3, 3, 2)


@pytest.mark.parametrize(
    "value",
    [object(), {"net": len}, None, "net.safetensors", 3],
    ids=["object", "function", "none", "path", "number"],
)
def test_an_object_of_no_backend_is_refused(reference, value):
    with pytest.raises(UnsupportedValueError, match="summarize a model"):
        reference.summarize(value)


def test_a_list_that_holds_itself_is_walked_once(reference):
    values = [reference.ones(3)]
    values.append(values)
    assert reference.summarize(values).total.parameters == 3
