"""What a notebook shows of d2ldev's objects: small tables that say what the text says."""

import copy
import pickle
import re
import sys
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.report import Report
from d2ldev_conformance.requirement import Requirement
from d2ldev_conformance.schema import ReportDocument, read_report

from d2ldev import Device, gpu
from d2ldev.display import format_html_table, format_text_table, is_notebook
from d2ldev.framework import CPU
from d2ldev.operations.timing import Timing
from d2ldev.results import History


class Text(HTMLParser):
    """The text of a fragment; each tag has to be closed, and none names a colour."""

    def __init__(self, fragment):
        super().__init__()
        self.words, self.open = [], []
        self.feed(fragment)
        assert self.open == []
        assert "color" not in fragment
        assert "background" not in fragment

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data.split()


def words_of(text):
    return re.findall(r"[\w.:]+", text)


@pytest.mark.parametrize("device", [CPU, gpu(1)])
def test_a_device_says_the_same_as_its_text(device):
    assert " ".join(Text(device._repr_html_()).words) == repr(device)


def test_a_timing_has_the_numbers_of_its_text():
    timing = Timing(0.5, 0.4, 0.6, 7, 3, (CPU, gpu()))
    text = " ".join(Text(timing._repr_html_()).words)
    assert set(words_of(repr(timing))) <= set(words_of(text))


def test_a_placement_has_each_tensor_with_its_device(reference):
    net = {"a": reference.ones(2, device="gpu:1"), "<b>": reference.ones(2)}
    placement = reference.placement(net)
    words = Text(placement._repr_html_()).words
    assert words[:6] == ["1", "on", "cpu,", "1", "on", "gpu:1"]
    assert words[6:] == ["tensor", "device", "a", "gpu:1", "<b>", "cpu"]


@pytest.mark.parametrize("send", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_placement_is_a_dict(reference, send):
    placement = send(reference.placement({"a": reference.ones(2)}))
    assert placement == {"a": Device("cpu")}
    assert isinstance(placement, dict)
    assert repr(placement) == repr({"a": Device("cpu")})
    assert "_repr_html_" in dir(placement)


# -- reports -----------------------------------------------------------------------------------


@pytest.fixture
def document(reference):
    report = Report(reference)
    report.add(Requirement("copy.makes-new-memory", "6.7.2", "tensors"), "passed")
    report.add(Requirement("mlp.seeds", "6.7.2", "models"), "failed", "<3> != 4", "traceback")
    return report.document(1)


def test_a_report_shows_its_counts_and_what_is_not_met(document):
    shown = words_of(" ".join(Text(document._repr_html_()).words))
    assert shown == words_of(repr(document))
    assert "<3> != 4" in repr(document)
    assert "&lt;3&gt; != 4" in document._repr_html_()
    assert "mlp.seeds" in repr(document)
    assert "copy.makes" not in repr(document)


def test_a_report_that_is_read_shows_the_same(document, tmp_path):
    path = tmp_path / "conformance.json"
    path.write_text(format_lines(document), encoding="utf-8")
    found = read_report(path)
    assert type(found) is ReportDocument
    assert (found, repr(found)) == (document, repr(document))


# -- tables ------------------------------------------------------------------------------------


def test_all_text_of_a_table_is_escaped():
    hostile = "<script>alert('&')</script>"
    found = format_html_table([hostile], [[hostile]], caption=hostile, numbers=[hostile])
    assert "<script>" not in found
    assert unescape(found).count(hostile) == 3


def test_a_long_table_shows_its_first_and_its_last_rows():
    long = [(number,) for number in range(1000)]
    found = format_html_table(["row"], long, limit=5)
    assert Text(found).words == ["row", "0", "1", "…", "997", "998", "999"]
    assert Text(format_html_table(["row"], long[:5], limit=5)).words[1:] == list("01234")


def test_the_tables_of_large_models_and_long_runs_are_short(reference):
    net = {f"layer{number}": reference.ones(1) for number in range(1000)}
    placement = reference.placement(net)._repr_html_()
    assert "1000 on cpu" in placement
    assert "layer999" in placement
    history = History(loss=[float(number) for number in range(1000)])._repr_html_()
    assert ">1000</td>" in history
    assert max(len(placement), len(history)) < 12_000


def test_numbers_are_aligned_to_the_right():
    header, rows = ("name", "size"), [("a", 1), ("longer", 1000)]
    assert format_text_table(header, rows, numbers=["size"]).splitlines() == [
        "name    size",
        "a          1",
        "longer  1000",
    ]
    html = format_html_table(header, rows, numbers=["size"])
    assert html.count("text-align: right") == 3
    assert html.count("text-align: left") == 3


def test_a_terminal_of_ipython_is_no_notebook(monkeypatch):
    shell = SimpleNamespace()
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not is_notebook()
    shell.kernel = object()
    assert is_notebook()


def test_a_program_without_ipython_is_no_notebook():
    assert not is_notebook()


def test_a_history_has_no_columns_without_numbers():
    assert Text(History()._repr_html_()).words == ["epoch"]
