"""What the documents say is true: their commands, programs, tables and links."""

import json
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from d2ldev_conformance.lines import format_lines

import d2ldev
import d2ldev.framework
from d2ldev import loggers, results

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = {
    str(path.relative_to(folder)): path.read_text(encoding="utf-8")
    for folder, paths in ((ROOT, ["README.md"]), (ROOT / "docs", (ROOT / "docs").rglob("*.md")))
    for path in (folder / each for each in paths)
}
TOOL = runpy.run_path(str(ROOT / "tools" / "tables.py"))
# The site fills the tables of these.
BUILT = [str(path.relative_to(ROOT / "docs")) for path in TOOL["BUILT"]]
DOCUMENTS |= {name: TOOL["with_tables"](DOCUMENTS[name]) for name in BUILT}
README = DOCUMENTS["README.md"]
SPEED, TABLES = DOCUMENTS["speed.md"], DOCUMENTS["speed-tables.md"]


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands():
    return [block.splitlines()[-1] for block in blocks("bash")]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 90


def test_the_readme_gives_the_reason_of_each_failure():
    block = README.split("<!-- support-summary -->")[1].split("<!-- end")[0]
    failed = re.findall(r"^\| (\w+) .*?(\d+) failed", block, re.MULTILINE)
    told = re.findall(r"^(\w+)'s (\d+) failures", README, re.MULTILINE)
    assert [(name.lower(), count) for name, count in told] == failed


def test_the_documents_install_d2ldev_from_where_it_is():
    source, install = TOOL["SOURCE"], re.compile(r"""pip install ["']?((?:\S*/)?d2ldev\b)""")
    named = {name: {*install.findall(text)} for name, text in DOCUMENTS.items()}
    assert {name: found - {source} for name, found in named.items() if found - {source}} == {}
    assert source in named["README.md"] & named["start.md"]


def test_a_release_changes_the_install_lines_by_one_constant(tool, monkeypatch):
    monkeypatch.setitem(tool["with_tables"].__globals__, "SOURCE", "d2ldev")
    text = tool["with_tables"](DOCUMENTS["start.md"])
    assert 'pip install "d2ldev[all,torch]"' in text
    assert "No package index" not in text


def test_there_are_two_commands():
    tour, test = commands()
    assert tour.endswith("d2ldev tour")
    assert test.endswith("tox -p auto -o")


def test_ci_runs_the_first_command_in_the_source_of_a_release():
    tool = runpy.run_path(str(ROOT / "tools" / "first_command.py"))
    assert tool["find_command"](README) == commands()[0]
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert "tools/first_command.py {env_tmp_dir}/dist" in tox


def test_the_readme_names_environments_of_tox_and_extras_with_their_bounds():
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    environments = re.search(r"^env_list = (.+)$", tox, re.MULTILINE)[1].split(", ")
    (named,) = re.findall(r"`tox -e ([\w,]+)`", README)
    assert {*named.split(",")} <= {*environments}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    rows = re.findall(r"^\| \w+ ([\d.]+)(?: or later)?[^|]* \| `(\w+)`", README, re.MULTILINE)
    assert [extra for _, extra in rows] == ["torch", "jax", "tensorflow", "mxnet"]
    for version, extra in rows:
        pins = [re.split("[>=]=|;", each)[:2] for each in extras[extra]]
        assert [extra, version] in [[name.removesuffix("-cpu"), bound] for name, bound in pins]
    assert {*re.findall(r"d2ldev\[([\w-]+)\]", README)} <= {*extras}


def test_ci_runs_the_second_command():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands()[1]


API = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")}


def test_the_reference_has_every_public_name_once():
    directive = r"^\.\. (?:auto(?:class|data|exception|function)|py:data):: (\w+)$"
    named = re.findall(directive, "\n".join(API.values()), re.MULTILINE)
    assert sorted(named) == sorted({*d2ldev.__all__, *loggers.__all__, *results.__all__})


def test_the_page_of_the_backend_has_each_method_in_its_table_and_in_a_section():
    members = sorted(name for name in dir(d2ldev.Backend) if not name.startswith("_"))
    page = API["backend.md"]
    assert sorted(re.findall(r"^   ~Backend\.(\w+)$", page, re.MULTILINE)) == members
    directive = r"^\.\. auto(?:method|property):: Backend\.(\w+)$"
    assert sorted(re.findall(directive, page, re.MULTILINE)) == members


def test_the_pages_for_authors_have_each_name_once():
    classes = re.findall(r"^## (\w+)$", API["interface.md"], re.MULTILINE)
    others = re.findall(r"^### (\w+)$", API["framework.md"], re.MULTILINE)
    assert sorted([*classes, *others, "nvml"]) == sorted(d2ldev.framework.__all__)
    assert all(re.search(rf"^### {name}\.\w+$", API["interface.md"], re.M) for name in classes)


@pytest.mark.parametrize("program", [*blocks("python"), *blocks("python", DOCUMENTS["index.md"])])
def test_a_program_runs_on_two_virtual_gpus(program, reference):
    with d2ldev.use_backend(reference):
        namespace = {}
        exec(program, namespace)
        assert str(reference.device_of(namespace["X"])) == "gpu:0"


@pytest.fixture(scope="module")
def tool():
    return TOOL


@pytest.mark.parametrize("name", DOCUMENTS)
def test_code_is_as_wide_as_the_site_shows_it(name):
    """The site breaks lines of the language ``text``. ``tools/open_site.py`` measures them all."""
    code = re.findall(r"^ *```(\w*).*?\n(.*?)^ *```$", DOCUMENTS[name], re.MULTILINE | re.DOTALL)
    lines = [line for language, text in code if language != "text" for line in text.splitlines()]
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("words", ["warm-up", "gradient accumulation", "workers", "metrics"])
def test_words_that_readers_search_for_stand_in_a_heading(words):
    headings = re.findall(r"^#+ (.+)$", "\n".join(DOCUMENTS.values()), re.MULTILINE)
    assert words in map(str.lower, headings)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_tables_are_those_of_the_results(name, tool):
    assert tool["with_tables"](DOCUMENTS[name]) == DOCUMENTS[name]


@pytest.mark.parametrize("name", BUILT)
def test_a_long_page_is_kept_without_its_tables(name):
    kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "\n|" not in kept
    assert "\n|" in DOCUMENTS[name]


def make_row(number, outcome):
    """Return a row of a report, with the keys that the schema has."""
    told = {"tests": {outcome: 1}, "reasons": [], "errors": []}
    names = {"requirement": f"copy.{number}", "module": "tensors", "section": "6.7.2"}
    return {**names, "outcome": outcome, **told}


@pytest.fixture
def kept_reports(tool, tmp_path, monkeypatch):
    """Return what keeps a report of torch on a platform, and the row of torch after it."""
    folder = tmp_path / "conformance" / "results"
    folder.mkdir(parents=True)
    (folder / "not_run.toml").write_text("[mxnet]\ncuda = 'not run: no code for this card'\n")
    monkeypatch.setitem(tool["support_rows"].__globals__, "ROOT", tmp_path)

    def keep(name, platform, date, passed, failed=0, *, backend="torch", card=None, commit=""):
        report = {
            "schema": 1,
            "backend": backend,
            "date": f"{date}T12:00:00+00:00",
            "versions": {"d2ldev": "0.1.0", backend: f"of {date}"},
            "commit": commit,
            "suite": "",
            "machine": "Linux x86_64",
            "devices": [{"device": "cpu", "platform": "cpu"}, {"device": "", "platform": platform}],
            "cards": [card] if card else [],
            "exit_status": None,
            "summary": {"passed": passed, "failed": failed, "skipped": 0},
            "requirements": [
                make_row(number, "failed" if number < failed else "passed")
                for number in range(passed + failed)
            ],
        }
        (folder / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
        return next(row for row in tool["support_rows"]() if row.startswith(f"| {backend} |"))

    return keep


def test_the_support_table_shows_the_last_run_on_hardware_with_its_card_and_date(kept_reports):
    kept_reports("a", "cpu", "2026-11-27", 9)
    kept_reports("z", "cuda", "2026-11-20", 4, 5, card="an old card")
    row = kept_reports("b", "cuda", "2026-11-26", 7, 2, card="a card")
    assert row == (
        "| torch | 9 passed | not run | 7 passed, 2 failed; a card, torch of 2026-11-26; "
        "2026-11-26 | torch of 2026-11-27; 2026-11-27 |"
    )


def test_the_support_table_counts_what_a_run_on_hardware_did_not_reach(kept_reports):
    kept_reports("a", "cpu", "2026-11-27", 9)
    row = kept_reports("b", "cuda", "2026-11-26", 4, card="a card")
    assert "| 4 passed, 5 not run; a card" in row


def test_the_support_table_says_why_a_backend_was_not_run(kept_reports):
    row = kept_reports("a", "cpu", "2026-11-27", 9, backend="mxnet")
    assert "| 9 passed | not run | not run: no code for this card |" in row


def test_the_table_of_the_readme_counts_what_passed_failed_and_was_not_run(kept_reports, tool):
    kept_reports("a", "cpu", "2026-11-27", 9)
    kept_reports("b", "cuda", "2026-11-26", 4, 2, card="a card (driver 1)")
    kept_reports("c", "virtual", "2026-11-27", 3, backend="mxnet")
    assert [*tool["support_summary_rows"]()][2:] == [
        "| mxnet | not run | 3 passed | not run |",
        "| torch | 9 passed | not run | 4 passed, 2 failed, 3 not run; a card |",
    ]


@pytest.fixture
def history(tool, tmp_path, monkeypatch):
    """Return what adds an empty commit to the history of the kept reports, and returns its name."""
    monkeypatch.setitem(tool["support_rows"].__globals__, "OLD", 2)

    def git(*arguments, folder=tmp_path):
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit():
        git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--allow-empty", "-qm", "x")
        return git("rev-parse", "--short=8", "HEAD")

    git("init", "-q")
    commit.git = git
    return commit


def read_old(tool):
    """Return the line about old reports, in a document that has another one."""
    text = "<!-- old-reports -->\nas before\n<!-- end of old-reports -->"
    return "\n".join(tool["with_tables"](text).splitlines()[1:-1])


def test_the_documents_name_a_report_from_hardware_that_is_old(kept_reports, history, tool):
    commit = history()
    kept_reports("a", "cuda", "2026-11-26", 4, commit=commit)
    kept_reports("b", "cpu", "2026-11-26", 4)  # it can be made again on any machine
    history(), history()
    assert read_old(tool) == ""
    history()
    told = "Reports on CUDA that are old, more than 2 commits behind: torch"
    assert read_old(tool) == f"{told} ({commit})."
    history()
    assert read_old(tool) == f"{told} ({commit})."  # the same, at each further commit


@pytest.mark.parametrize("commit", ["", "1234abcd", "HEAD", "--all", "\x1b"])
def test_a_report_whose_commit_is_not_in_the_history_is_old(kept_reports, history, tool, commit):
    history()
    kept_reports("a", "cuda", "2026-11-26", 4, commit=commit)
    assert read_old(tool).endswith(f"behind: torch ({commit or 'of no commit'}).")


def test_a_report_of_a_changed_checkout_is_as_old_as_its_commit(kept_reports, history, tool):
    kept_reports("a", "cuda", "2026-11-26", 4, commit=f"{history()}-dirty")
    assert read_old(tool) == ""


def test_without_the_whole_history_the_line_about_old_reports_stays(
    kept_reports, history, tool, tmp_path, monkeypatch
):
    kept_reports("a", "cuda", "2026-11-26", 4)
    history(), history()
    shallow = tmp_path / "shallow"
    history.git("clone", "-q", "--depth=1", f"file://{tmp_path}", str(shallow))
    archive = tmp_path / "conformance"  # inside of a checkout
    for folder in (shallow, archive):
        shutil.copytree(tmp_path / "conformance" / "results", folder / "conformance" / "results")
        monkeypatch.setitem(tool["support_rows"].__globals__, "ROOT", folder)
        assert read_old(tool) == "as before"


def test_a_way_that_is_as_fast_as_the_first_has_its_row(tool, tmp_path, monkeypatch):
    kept = ROOT / "benchmarks" / "results" / "cuda" / "small_calls-torch.json"
    document = json.loads(kept.read_text(encoding="utf-8"))
    ways = ("native", 1.0), ("d2ldev", 1.0), ("accelerate", 2.0)
    document["results"] = [{"name": "to", "way": x, "ratio": y, "aim": None} for x, y in ways]
    folder = tmp_path / "benchmarks" / "results" / "cuda"
    folder.mkdir(parents=True)
    (folder / kept.name).write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setitem(tool["small_call_rows"].__globals__, "ROOT", tmp_path)
    rows = [row for row in tool["small_call_rows"]() if row.startswith("| torch")]
    assert rows == [
        "| torch | to | d2ldev, against native | 1 |  |",
        "| torch | to | accelerate, against native | 2 |  |",
    ]


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/*.md")])


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    links = re.findall(
        r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")
    )
    for link, anchor in links:
        target = page.parent / link if link else page
        assert target.is_file(), link  # the site has no page for a folder
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_each_decision_is_in_the_list_and_fits_on_a_page():
    folder = ROOT / "docs" / "decisions"
    records = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    listed = re.findall(r"\]\((\S+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == [path.name for path in records]
    for path in records:
        text = path.read_text(encoding="utf-8")
        parts = re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Why", "Alternatives", "Consequences"], path
        assert len(text.splitlines()) <= 40, path


def test_the_summary_of_speed_is_short():
    assert len(SPEED.splitlines()) < 100


def test_the_summary_counts_each_comparison_and_each_miss():
    block = SPEED.split("<!-- speed-summary -->")[1].split("<!-- end")[0]
    judged = [result for _, result in list_results() if result["met"] is not None]
    judged = [result for result in judged if result["unit"] in ("ratio", "slope")]
    on_cards = [(ratio, aim) for ratio, aim in ratios_on_cards() if aim is not None]
    counts = re.findall(r"(?:(\d+) of|all) (\d+) m", block)
    assert sum(int(total) for _, total in counts) == len(judged) + len(on_cards)
    missed = [result for result in judged if not result["met"]]
    missed_on_cards = [ratio for ratio, aim in on_cards if ratio > aim]
    assert sum(int(each or 0) for each, _ in counts) == len(missed) + len(missed_on_cards)


def test_the_summary_explains_each_miss():
    block = SPEED.split("<!-- speed-misses -->")[1].split("<!-- end")[0]
    rows = [line.split(" | ") for line in block.splitlines()[3:]]
    missed = [result for _, result in list_results() if result["met"] is False]
    assert sum(int(row[2]) for row in rows) == len(missed)


def test_every_row_of_a_speed_table_names_its_framework():
    rows = [line for line in TABLES.splitlines() if line.startswith("|")]
    first = {row.split("|")[1].strip() for row in rows}
    assert first == {"framework", "---", "torch", "jax", "tensorflow", "mxnet"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_row_of_a_table_is_one_line(name):
    rows = [line for line in DOCUMENTS[name].splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.endswith("|")] == []


def test_results_that_change_change_the_documents(tool, tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", results)
    shutil.copytree(ROOT / "conformance" / "results", tmp_path / "conformance" / "results")
    shutil.copy(ROOT / "conformance" / "versions.toml", tmp_path / "conformance")
    monkeypatch.setitem(tool["with_tables"].__globals__, "ROOT", tmp_path)
    before = TABLES
    assert tool["with_tables"](before) == before
    for path in results.glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        for change in (
            lambda document: document["results"][0].update(value=123456.0, met=False),
            lambda document: document.update(date="1999-12-31"),
            lambda document: document.update(machine="an abacus"),
            lambda document: document["versions"].update(d2ldev="99"),
        ):
            changed = json.loads(json.dumps(document))
            change(changed)
            path.write_text(json.dumps(changed), encoding="utf-8")
            assert tool["with_tables"](before) != before
        path.write_text(json.dumps(document), encoding="utf-8")


# A decision has the figures of its day.
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if "decisions/" not in name])
def test_no_figure_is_typed_by_hand(name):
    # Timeouts, which are no measurements, are in seconds.
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", DOCUMENTS[name], flags=re.DOTALL)
    unit = r"(?:ns|us|µs|ms|[kMG]i?B/s|[MGT]FLOPS|%|times (?:as|faster|slower)|x faster)"
    assert re.findall(rf"\b\d[\d.]* ?{unit}(?!\w)", text) == []
    # Without a point it is a limit, such as 32 MB of a header.
    assert re.findall(r"\b\d+\.\d+ ?[kMG]i?B\b", text) == []
    assert re.findall(r"\b\d[\d.]* of the \w+'s time", text) == []


def test_times_of_a_cpu_are_ratios():
    assert re.findall(r"\b[\d.]+ (?:ns|us|ms)\b", TABLES) == []


def test_no_missed_figure_is_shown_as_its_aim():
    missed = r"\| ([\d.]+)(?: [a-z][^|]*)? \|(?: [^|]* to [^|]* \|)? ([\d.]+) \*\*missed"
    rows = re.findall(missed, TABLES)
    assert len(rows) == TABLES.count("**missed**")
    assert [row for row in rows if float(row[0]) == float(row[1])] == []


KEPT = sorted(
    path
    for folder in ("benchmarks", "conformance")
    for path in (ROOT / folder).rglob("results/**/*.json")
)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_result_has_a_line_for_each_row(path):
    text = path.read_text(encoding="utf-8")
    assert text == format_lines(json.loads(text))


def list_results():
    """Each result of the benchmarks, with the name of its file."""
    return [
        (path.stem, result)
        for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
        for result in json.loads(path.read_text(encoding="utf-8"))["results"]
    ]


def test_every_missed_aim_has_a_reason(tool):
    missed = [(file, result) for file, result in list_results() if result["met"] is False]
    reason_of, known = tool["reason_of"], [*tool["reasons"]()]
    without = [
        (file, result["name"])
        for file, result in missed
        if not (result["note"] if file.startswith("peers-") else reason_of(file, result, known))
    ]
    assert without == []


def test_every_reason_is_of_an_aim_that_is_missed(tool):
    missed = [(file, result) for file, result in list_results() if result["met"] is False]
    without = [
        (files, row)
        for files, row, why in tool["reasons"]()
        if not why or not any(tool["is_of"](file, result, files, row) for file, result in missed)
    ]
    assert without == []


def ratios_on_cards():
    """Each ratio that was measured on a GPU by ``ci/cuda/run``, with its aim."""
    for path in sorted((ROOT / "benchmarks" / "results" / "cuda").glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["results"]:
            yield (row["ratios"]["d2ldev"] if "ratios" in row else row["ratio"]), row["aim"]


def test_every_missed_aim_is_marked():
    missed = [result for _, result in list_results() if result["met"] is False]
    on_cards = [ratio for ratio, aim in ratios_on_cards() if aim is not None and ratio > aim]
    assert TABLES.count("**missed**") == len(missed) + len(on_cards)
