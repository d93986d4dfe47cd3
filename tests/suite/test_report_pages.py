"""The page of a report and of a matrix: complete, escaped, and right on a phone."""

import copy
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from d2ldev_conformance.matrix import build_matrix, merge_reports
from d2ldev_conformance.page import format_page
from d2ldev_conformance.report import Report
from d2ldev_conformance.requirement import Requirement
from d2ldev_conformance.schema import find_problems, read_report

import d2ldev

RESULTS = Path(__file__).parents[2] / "conformance" / "results"
KEPT = sorted(RESULTS.glob("*.json"))
CHROMIUM = shutil.which("chromium")
HOSTILE = "<script>document.title = 'taken'</script> & \"quoted\""
ROWS = (
    ("create.cpu", "devices", "passed", "", ""),
    ("copy.values", "tensors", "failed", "call: AssertionError: 1", f"t.py:8\n{HOSTILE}"),
    ("copy.two", "tensors", "skipped", f"needs 2 GPUs {HOSTILE}", ""),
    ("mlp.shape", "models", "not begun", "write Models.mlp", ""),
)


@pytest.fixture
def document(reference):
    """Return a report with a row of each of the outcomes above."""
    report = Report(reference)
    for name, module, *told in ROWS:
        report.add(Requirement(name, "6.7.2", module), *told)
    return report.document(exit_status=1)


class _Cells(HTMLParser):
    """Collect the text of each row of a table, and the tags of the page."""

    def __init__(self):
        super().__init__()
        self.rows, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append((dict(attrs).get("class"), []))
        elif tag in ("th", "td"):
            self.rows[-1][1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1][1]:
            self.rows[-1][1][-1] += data


def read_page(matrix):
    """Return the cells of each requirement's row by its id, and the tags of the page."""
    parser = _Cells()
    parser.feed(format_page(matrix).split("</table>")[0])
    rows = {cells[0].split()[0]: cells[1:] for kind, cells in parser.rows if kind == "requirement"}
    return rows, parser.tags


def test_every_requirement_has_a_row_with_its_outcome_in_words(document):
    rows, _ = read_page(build_matrix({"torch": document}))
    assert list(rows) == ["create.cpu", "copy.two", "copy.values", "mlp.shape"]
    for name, _, outcome, *_ in ROWS:
        assert outcome in rows[name][0]


def test_a_failure_shows_its_error_and_a_skip_its_reason_in_a_cell_that_opens(document):
    rows, tags = read_page(build_matrix({"torch": document}))
    assert f"t.py:8\n{HOSTILE}" in rows["copy.values"][0]
    assert f"needs 2 GPUs {HOSTILE}" in rows["copy.two"][0]
    assert "write Models.mlp" in rows["mlp.shape"][0]
    assert tags.count("details") == 3


def test_a_failure_shows_the_reasons_of_its_skipped_tests_and_no_line_twice(document):
    row = document["requirements"][1]
    row.update(
        reasons=["call: E: 1", "needs 2 GPUs; it has 1"], errors=["t.py::test\nt.py:8: E: 1"]
    )
    cell = read_page(build_matrix({"torch": document}))[0][row["requirement"]][0]
    assert "needs 2 GPUs; it has 1" in cell
    assert cell.count("E: 1") == 1


def test_a_page_escapes_everything(document):
    hostile = copy.deepcopy(document)
    hostile["backend"] = hostile["date"] = hostile["machine"] = HOSTILE
    hostile["versions"] = {HOSTILE: HOSTILE}
    hostile["cards"] = [HOSTILE]
    hostile["devices"] = [{"device": HOSTILE, "platform": HOSTILE}] * 2
    hostile["requirements"][0].update(requirement=HOSTILE, section=HOSTILE)
    hostile["commit"] = hostile["suite"] = HOSTILE
    for documents in ({HOSTILE: hostile}, {HOSTILE: hostile, "": hostile, "torch": document}):
        page = format_page(build_matrix(documents))
        assert page.count("<script>") == 1
        assert HOSTILE not in page
        assert html.escape(HOSTILE) in page


def test_a_page_loads_nothing(document):
    page = format_page(build_matrix({"torch": document}))
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", page) == []


def test_errors_are_cut_and_counted(reference):
    report = Report(reference)
    requirement = Requirement("copy.values", "6.7.2", "tensors")
    for number in range(9):
        report.add(requirement, "failed", "call: E", str(number) * 5000)
    (row,) = report.rows()
    assert [error[0] for error in row["errors"]] == ["0", "1", "2"]
    assert all(len(error) < 2010 for error in row["errors"])


def test_a_matrix_has_the_rows_of_all_runs(document):
    other = copy.deepcopy(document)
    del other["requirements"][0]
    other["requirements"].append({**document["requirements"][0], "requirement": "copy.only-here"})
    matrix = build_matrix({"torch": document, "other": other})
    rows, _ = read_page(matrix)
    assert set(rows) == {name for name, *_ in ROWS} | {"copy.only-here"}
    assert all(len(cells) == 2 for cells in rows.values())
    missing = document["requirements"][0]["requirement"]
    assert "not in this run" in rows[missing][1]
    assert "not in this run" in rows["copy.only-here"][0]
    modules = [row["module"] for row in matrix["requirements"]]
    assert modules == sorted(modules, key=["devices", "tensors", "models"].index)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_report_can_be_read(path):
    assert path.stem.startswith(read_report(path)["backend"])


def test_what_a_run_writes_is_of_the_schema(document):
    assert document["schema"] == 1
    assert list(find_problems(json.loads(json.dumps(document)))) == []


def set_schema(document):
    document["schema"] = 7


def leave_out_the_schema(document):
    del document["schema"]


def set_a_word_for_the_date(document):
    document["date"] = "today"


def repeat_a_requirement(document):
    document["requirements"].append(document["requirements"][0])


def hide_a_failure(document):
    document["requirements"][1]["outcome"] = "passed"


def count_one_too_many(document):
    document["summary"]["passed"] += 1


def count_below_zero(document):
    document["requirements"][0]["tests"]["passed"] = -1


def count_an_unknown_outcome(document):
    document["summary"]["odd"] = 0


def leave_out_the_devices(document):
    document["devices"] = []


def end_with_text(document):
    document["exit_status"] = "1"


def leave_out_a_key(document):
    del document["requirements"][1]["reasons"]


def set_an_unknown_outcome(document):
    document["requirements"][1]["outcome"] = "odd"


def count_with_text(document):
    document["summary"]["passed"] = "many"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (set_schema, "it has schema 7, and this d2ldev reads schema 1"),
        (leave_out_the_schema, "it has no schema, and this d2ldev reads schema 1"),
        (set_a_word_for_the_date, "date is 'today', which is no date"),
        (repeat_a_requirement, "requirements has copy.two 2 times"),
        (hide_a_failure, "requirements[1].outcome is passed, and its tests say failed"),
        (count_one_too_many, "summary is {'passed': 2, 'failed': 1"),
        (count_below_zero, "requirements[0].tests.passed is -1, which is less than 0"),
        (count_an_unknown_outcome, "a key of summary is 'odd', not one of passed, failed"),
        (leave_out_the_devices, "devices is empty"),
        (end_with_text, "exit_status has the type str, not int or None"),
        (leave_out_a_key, "requirements[1].reasons is missing"),
        (set_an_unknown_outcome, "requirements[1].outcome is 'odd', not one of passed, failed"),
        (count_with_text, "summary.passed has the type str, not int"),
    ],
)
def test_a_report_that_is_not_of_the_schema_is_refused(document, tmp_path, change, problem):
    change(document)
    (tmp_path / "conformance.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(d2ldev.UnsupportedValueError) as caught:
        merge_reports([tmp_path], tmp_path / "out")
    assert problem in str(caught.value)
    assert "conformance.json" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema": 1}', "[" * 100_000, "\x00"])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(d2ldev.UnsupportedValueError, match=r"cannot read the report .*a\.json"):
        merge_reports([tmp_path / "a.json"], tmp_path / "out")


def test_a_folder_without_a_report_is_refused(tmp_path):
    with pytest.raises(d2ldev.UnsupportedValueError, match="the folder has no report"):
        merge_reports([tmp_path], tmp_path / "out")


def test_the_reports_of_a_profile_are_merged_from_their_folder_each_once(document, tmp_path):
    for name in ("cpu", "virtual-2"):
        (tmp_path / name).mkdir()
        text = json.dumps(document)
        (tmp_path / name / "conformance.json").write_text(text, encoding="utf-8")
    for _ in range(2):  # the first matrix is no report of the second
        merge_reports([tmp_path, tmp_path / "cpu"], tmp_path)
    matrix = json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))
    assert [run["source"] for run in matrix["runs"]] == ["cpu", "virtual-2"]


PROBE = """
<script>
const page = document.querySelector("iframe");
page.onload = () => {
  const inner = page.contentDocument, root = inner.documentElement;
  const form = inner.querySelector("form");
  const see = (kind) => [...inner.querySelectorAll(kind)].filter((row) => row.offsetHeight).length;
  const choose = (name, value) => {
    form.reset();
    form.elements[name].value = value;
    form.dispatchEvent(new Event("input"));
    return [see("tr.requirement"), see("tr.module")];
  };
  inner.querySelectorAll("details").forEach((each) => { each.open = true; });
  const found = { width: root.scrollWidth, all: choose("text", ""),
    failed: choose("outcome", "failed"), tensors: choose("module", "tensors"),
    text: choose("text", "NEEDS 2 gpus"),
    back: getComputedStyle(inner.body).backgroundColor, title: inner.title };
  document.body.dataset.found = JSON.stringify(found);
};
page.srcdoc = PAGE;
</script>
"""


def look_at(page, folder, *options):
    """Return what Chromium finds in a page that is 390 pixels wide."""
    text = json.dumps(page).replace("</", "<\\/")
    frame = '<iframe width="390" height="844"></iframe>'
    document = f"<body>{frame}<script>const PAGE = {text}</script>{PROBE}</body>"
    (folder / "probe.html").write_text(document, encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={folder / 'profile'}",
            *options,
            *("--virtual-time-budget=5000", "--dump-dom", (folder / "probe.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    return json.loads(html.unescape(found))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("number", [1, 5])
def test_a_page_fits_on_a_phone_and_filters(document, tmp_path, number):
    found = look_at(format_page(build_matrix(dict.fromkeys("abcde"[:number], document))), tmp_path)
    assert found["width"] <= 390
    # Requirements and modules: a module without a row that fits is hidden.
    assert found["all"] == [4, 3]
    assert found["failed"] == [1, 1]
    assert found["tensors"] == [2, 1]
    assert found["text"] == [1, 1]
    assert found["title"].startswith("Conformance of")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_page_is_dark_where_the_reader_prefers_it(document, tmp_path):
    page = format_page(build_matrix({"torch": document}))
    assert look_at(page, tmp_path)["back"] == "rgb(255, 255, 255)"
    dark = look_at(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert dark["back"] == "rgb(20, 23, 26)"
