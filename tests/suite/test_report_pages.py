"""The page of a report and of a matrix: complete, escaped, and right on a phone."""

import copy
import functools
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from d2ldev_conformance import report
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.matrix import build_matrix, merge_reports
from d2ldev_conformance.origin import digest_suite, find_commit
from d2ldev_conformance.page import format_page
from d2ldev_conformance.report import Report
from d2ldev_conformance.requirement import Requirement
from d2ldev_conformance.schema import find_problems, read_report
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import d2ldev
from d2ldev.framework import INTERFACE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "conformance" / "results"
KEPT = sorted(RESULTS.glob("*.json"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
HOSTILE = (
    "</script></pre></option><script>document.title = 'taken'</script> & \"quoted' "
    "<img src=x onerror=\"document.title = 'taken'\"> $title \u202e \x00"
)
ROWS = (
    ("create.cpu", "devices", "passed", "", ""),
    ("copy.twos", "tensors", "failed", "call: AssertionError: 1", f"t.py:8\n{HOSTILE}"),
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
    """Collect the text of each row of a table, and the names of attributes."""

    def __init__(self):
        super().__init__()
        self.rows, self.attributes = [], set()

    def handle_starttag(self, tag, attrs):
        self.attributes |= {*dict(attrs)}
        if tag == "tr":
            self.rows.append((dict(attrs).get("class"), []))
        elif tag in ("th", "td"):
            self.rows[-1][1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1][1]:
            self.rows[-1][1][-1] += data


def read_rows(matrix):
    """Return the cells of each requirement's row by its id, the head of the row among them."""
    parser = _Cells()
    parser.feed(format_page(matrix).split("</table>")[0])
    return {cells[0].split()[0]: cells for kind, cells in parser.rows if kind == "requirement"}


def read_page(matrix):
    """Return the cells of each requirement's row by its id, one for each run."""
    return {name: cells for name, (_, *cells) in read_rows(matrix).items()}


def test_every_requirement_has_a_row_with_its_outcome_in_words(document):
    rows = read_page(build_matrix({"torch": document}))
    assert list(rows) == ["create.cpu", "copy.two", "copy.twos", "mlp.shape"]
    for name, _, outcome, *_ in ROWS:
        assert outcome in rows[name][0]


def test_a_failure_shows_its_error_and_a_skip_its_reason_in_a_cell_that_opens(document):
    matrix = build_matrix({"torch": document})
    rows = read_page(matrix)
    assert f"t.py:8\n{HOSTILE}" in rows["copy.twos"][0]
    assert f"needs 2 GPUs {HOSTILE}" in rows["copy.two"][0]
    assert "write Models.mlp" in rows["mlp.shape"][0]
    assert len(re.findall(r"<td [^>]*><details>", format_page(matrix))) == 3


def test_a_failure_shows_the_reasons_of_its_skipped_tests_and_no_line_twice(document):
    row = document["requirements"][1]
    row.update(
        reasons=["call: E: 1", "needs 2 GPUs; it has 1"], errors=["t.py::test\nt.py:8: E: 1"]
    )
    cell = read_page(build_matrix({"torch": document}))[row["requirement"]][0]
    assert "needs 2 GPUs; it has 1" in cell
    assert cell.count("E: 1") == 1


def make_hostile(document):
    """Return a report with hostile text wherever text is free."""
    hostile = copy.deepcopy(document)
    hostile["backend"] = hostile["date"] = hostile["machine"] = HOSTILE
    hostile["versions"] = {HOSTILE: HOSTILE}
    hostile["cards"] = [HOSTILE]
    hostile["devices"] = [{"device": HOSTILE, "platform": HOSTILE}] * 2
    hostile["requirements"][0].update(requirement=HOSTILE, section=HOSTILE)
    hostile["commit"] = hostile["suite"] = HOSTILE
    return hostile


def test_a_page_escapes_everything(document):
    hostile = make_hostile(document)
    for documents in ({HOSTILE: hostile}, {HOSTILE: hostile, "": hostile, "torch": document}):
        page = format_page(build_matrix(documents))
        assert page.count("<script>") == 1
        assert "<img" not in page
        assert HOSTILE not in page
        assert html.escape(HOSTILE) in page


def test_a_page_loads_nothing(document):
    page = format_page(build_matrix({"torch": document}))
    parser = _Cells()
    parser.feed(page)
    assert parser.attributes.isdisjoint({"src", "srcset", "href", "data", "action"})
    assert re.findall(r"url\(|@import|https?://", page) == []
    assert "content=\"default-src 'none'" in page


def test_a_row_opens_what_its_requirement_asks(document):
    row = document["requirements"][0]
    row["requirement"] = "devices.cpu-is-one"
    (asks,) = {each.asks for each in list_explanations() if each.id == "devices.cpu-is-one"}
    assert (
        asks.replace("``", "`")
        in read_rows(build_matrix({"torch": document}))["devices.cpu-is-one"][0]
    )


def test_a_page_shows_how_its_run_ended(document):
    assert "exit status 1" in format_page(build_matrix({"torch": document}))
    document["exit_status"] = 2
    page = format_page(build_matrix({"torch": document}))
    assert "torch was cut short: exit status 2, interrupted." in page


@pytest.mark.parametrize("passed", [0, 1])
def test_a_requirement_is_not_run_if_one_of_its_tests_did_not_end(reference, passed):
    """Not failed, and not passed: the other tests tell nothing of the one that did not end."""
    report = Report(reference)
    requirement = Requirement("copy.twos", "6.7.2", "tensors")
    for test in ("test_a", "test_b"):
        report.expect(requirement, test)
    if passed:
        report.add(requirement, "passed", test="test_a")
    document = report.document(exit_status=1)
    (row,) = document["requirements"]
    assert (row["outcome"], row["reasons"]) == ("not run", ["the run ended before"])
    assert row["tests"] == {"passed": 1, "not run": 1} if passed else {"not run": 2}
    assert not list(find_problems(dict(document)))
    assert "not run" in format_page(build_matrix({"torch": document}))


def test_errors_are_cut_and_counted(reference):
    report = Report(reference)
    requirement = Requirement("copy.twos", "6.7.2", "tensors")
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
    rows = read_page(matrix)
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


def give_a_version_as_a_number(document):
    document["versions"]["a\x1b"] = 1


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
        (repeat_a_requirement, "requirements has 'copy.two' 2 times"),
        (hide_a_failure, "requirements[1].outcome is passed, and its tests say failed"),
        (count_one_too_many, "summary is {'passed': 2, 'failed': 1"),
        (count_below_zero, "requirements[0].tests.passed is -1, which is less than 0"),
        (count_an_unknown_outcome, "a key of summary is 'odd', not one of passed, failed"),
        (leave_out_the_devices, "devices is empty"),
        (give_a_version_as_a_number, r"versions['a\x1b'] has the type int, not str"),
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


def write_report(folder, document, **changes):
    folder.mkdir()
    path = folder / "conformance.json"
    path.write_text(json.dumps({**document, **changes}), encoding="utf-8")
    return path


def test_a_matrix_names_what_differs_between_its_runs(document, tmp_path):
    old = {"suite": "1234abcd", "commit": "1111111"}
    new = {"suite": "5678abcd", "commit": "2222222"}
    places = [
        write_report(tmp_path / "old", document, **old),
        write_report(tmp_path / "new", document, **new),
        write_report(tmp_path / "half", document, **new, exit_status=2),
    ]
    merge_reports(places, tmp_path / "out")
    matrix = json.loads((tmp_path / "out" / "matrix.json").read_text(encoding="utf-8"))
    suites, same, short = matrix["notes"]
    assert "commit 1111111, suite 1234abcd: old;" in suites
    assert "commit 2222222, suite 5678abcd: new, half." in suites
    assert same.endswith("on 2 virtual ran 3 times: old, new, half.")
    assert short == "half was cut short: exit status 2, interrupted."
    page = (tmp_path / "out" / "matrix.html").read_text(encoding="utf-8")
    assert all(note in page for note in matrix["notes"])
    assert "<br>commit 1111111<br>" in page


def test_runs_of_one_suite_on_two_platforms_need_no_note(document):
    other = {**document, "devices": document["devices"][:1]}
    assert build_matrix({"virtual": document, "cpu": other})["notes"] == []


def test_reports_of_one_name_are_told_apart(document, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write_report(tmp_path / name / "cpu", document) for name in ("a", "b")]
    paths.append(tmp_path / "a" / "cpu.json")
    paths[-1].write_text(json.dumps(document), encoding="utf-8")
    merge_reports(paths, tmp_path / "out")
    runs = json.loads((tmp_path / "out" / "matrix.json").read_text(encoding="utf-8"))["runs"]
    names = [run["source"] for run in runs]
    assert len({*names}) == 3
    assert names[1] == "b/cpu"


def test_the_kept_reports_make_one_matrix(tmp_path):
    merge_reports([RESULTS], tmp_path)
    matrix = json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))
    assert [run["source"] for run in matrix["runs"]] == [path.stem for path in KEPT]
    for number, path in enumerate(KEPT):
        rows = json.loads(path.read_text(encoding="utf-8"))["requirements"]
        cells = {
            row["requirement"]: row["cells"][number]["outcome"]
            for row in matrix["requirements"]
            if row["cells"][number]
        }
        assert cells == {row["requirement"]: row["outcome"] for row in rows}


def test_a_matrix_that_cannot_be_written_is_refused(document, tmp_path):
    path = write_report(tmp_path / "cpu", document)
    with pytest.raises(d2ldev.UnsupportedValueError, match="cannot write the matrix into"):
        merge_reports([path], path)


def test_a_report_tells_the_versions_of_the_suite_and_of_the_interface(document):
    assert document["versions"]["d2ldev"] == d2ldev.__version__
    assert document["interface"] == INTERFACE
    page = format_page(build_matrix({"a": document}))
    told = (f"d2ldev {d2ldev.__version__}", f"interface {INTERFACE}", f"suite {document['suite']}")
    assert all(f"<br>{each}<br>" in page for each in told)
    del document["interface"]  # a report of before
    assert list(find_problems(dict(document))) == []
    page = format_page(build_matrix({"a": document}))
    assert "interface unknown" in page


def test_a_report_tells_the_version_of_the_backends_own_package(reference, monkeypatch):
    given = {"d2ldev": [], "d2ldev-mine": ["d2ldev-mine"], "numpy": []}
    for package, more in given.items():
        monkeypatch.setattr(report, "distributions_of", lambda name, package=package: [package])
        versions = Report(reference).document(exit_status=0)["versions"]
        assert [*versions] == ["d2ldev", "python", "array-api-strict", "numpy", *more]


def test_a_report_tells_its_commit_and_its_suite(document):
    assert re.fullmatch("[0-9a-f]{8}", document["suite"])
    assert document["suite"] == digest_suite()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_a_checkout_is_named_by_its_commit(monkeypatch):
    monkeypatch.setattr(d2ldev, "__file__", str(ROOT / "d2ldev" / "__init__.py"))
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    commit = find_commit().removesuffix("-dirty")
    assert len(commit) >= 7
    assert head.stdout.startswith(commit)


def test_an_installation_from_a_repository_is_named_by_its_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(d2ldev, "__file__", str(tmp_path / "d2ldev" / "__init__.py"))
    info = tmp_path / "d2ldev-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: d2ldev\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_commit() == ""
    noted = {"url": "https://example.org", "vcs_info": {"vcs": "git", "commit_id": "6fa62970" * 5}}
    (info / "direct_url.json").write_text(json.dumps(noted))
    assert find_commit() == "6fa62970"


EXAMPLES = int(os.environ.get("D2LDEV_TEST_EXAMPLES", "300"))
LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 2**70), st.floats()),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
VALUES = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=2) | st.dictionaries(st.just("passed"), each)
)


def list_places(value, path=()):
    """Yield the path of each value in a document."""
    yield path
    entries = {list: enumerate, dict: dict.items}.get(type(value), lambda _: ())(value)
    for key, each in entries:
        yield from list_places(each, (*path, key))


@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_a_damaged_report_is_refused_or_makes_a_page(document, tmp_path, data):
    damaged = copy.deepcopy(document)
    *way, last = data.draw(st.sampled_from([*list_places(dict(document))][1:]))
    place = functools.reduce(lambda value, key: value[key], way, damaged)
    if data.draw(st.booleans()):
        del place[last]
    else:
        place[last] = data.draw(VALUES)
    path = tmp_path / "conformance.json"
    path.write_text(json.dumps(damaged), encoding="utf-8")
    if problem := next(find_problems(json.loads(path.read_text(encoding="utf-8"))), ""):
        event("refused")
        with pytest.raises(d2ldev.UnsupportedValueError, match=re.escape(problem)):
            read_report(path)
    else:
        event("a page")
        assert "</html>" in format_page(build_matrix({"a": read_report(path)}))


PROBE = """
<script>
const page = document.querySelector("iframe");
page.onload = () => {
  const inner = page.contentDocument, root = inner.documentElement;
  const form = inner.querySelector("form");
  const see = (kind) =>
    [...inner.querySelectorAll(kind)].filter((each) => each.checkVisibility()).length;
  const choose = (name, value) => {
    form.reset();
    form.elements[name].value = value;
    form.dispatchEvent(new Event("input"));
    return [see("tr.requirement"), see("tr.module")];
  };
  const openers = [...inner.querySelectorAll("summary"), ...form.elements];
  const before = see(".told");
  openers.forEach((each) => { if (each.localName === "summary") each.click(); });
  const found = { width: root.scrollWidth, all: choose("text", ""), before, opened: see(".told"),
    told: inner.querySelectorAll(".told").length,
    failed: choose("outcome", "failed"), tensors: choose("module", "tensors"),
    text: choose("text", "NEEDS 2 gpus"),
    run: form.elements.run ? [choose("run", "1"), see("tr.requirement td")] : null,
    keyboard: openers.every((each) => each.tabIndex === 0 || each.localName === "output"),
    images: inner.images.length, scripts: inner.scripts.length,
    back: getComputedStyle(inner.body).backgroundColor, title: inner.title };
  document.body.dataset.found = JSON.stringify(found);
};
page.srcdoc = PAGE;
</script>
"""


def look_at(page, folder, *options):
    """Return what Chromium finds in a page that is 390 pixels wide, and what its console says."""
    text = json.dumps(page).replace("</", "<\\/")
    frame = '<iframe width="390" height="844"></iframe>'
    document = f"<body>{frame}<script>const PAGE = {text}</script>{PROBE}</body>"
    (folder / "probe.html").write_text(document, encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"),
            *options,
            *("--virtual-time-budget=5000", "--dump-dom", (folder / "probe.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    return json.loads(html.unescape(found)), re.findall(r".*CONSOLE.*", done.stderr)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("number", [1, 5])
def test_a_page_fits_on_a_phone_and_filters(document, tmp_path, number):
    page = format_page(build_matrix(dict.fromkeys("abcde"[:number], document)))
    found, console = look_at(page, tmp_path)
    assert console == []
    assert found["width"] <= 390
    # Requirements and modules: a module without a row that fits is hidden.
    assert found["all"] == [4, 3]
    assert found["failed"] == [1, 1]
    assert found["tensors"] == [2, 1]
    assert found["text"] == [1, 1]
    assert found["run"] == (None if number == 1 else [[4, 3], 4])
    assert (found["before"], found["opened"]) == (0, found["told"])
    assert found["told"] > 3 * number
    assert found["keyboard"]
    assert found["title"].startswith("Conformance of")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_page_is_dark_where_the_reader_prefers_it(document, tmp_path):
    page = format_page(build_matrix({"torch": document}))
    assert look_at(page, tmp_path)[0]["back"] == "rgb(255, 255, 255)"
    dark, _ = look_at(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert dark["back"] == "rgb(20, 23, 26)"


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_hostile_report_takes_no_browser(document, tmp_path):
    page = format_page(build_matrix({HOSTILE: make_hostile(document), "torch": document}))
    found, console = look_at(page, tmp_path)
    assert (found["images"], found["scripts"], console) == (0, 1, [])
    assert found["title"] == "Conformance of 2 runs"
    assert found["width"] <= 390


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_page_runs_no_script_but_its_own(document, tmp_path):
    page = format_page(build_matrix({"torch": document}))
    taken = page.replace("</table>", "</table><script>document.title = 'taken'</script>")
    found, console = look_at(taken, tmp_path)
    assert found["title"] == "Conformance of reference"
    assert "Content Security Policy" in "".join(console)
