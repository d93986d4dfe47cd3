"""Write the tables of the documents from the results that are kept: ``python tools/tables.py``.

It also writes the lines that install d2ldev: see ``SOURCE``.

Two pages are long, and have their tables on the site alone: ``BUILT``. With the path of a page, the
command prints the page with its tables.

``conformance/results/*.json`` are reports of the suite. ``tools/versions.py`` writes those in its
folder ``versions``. ``benchmarks/results/*.json`` are reports of the benchmarks. The requirements
are those of the suite, from the docstrings of its tests. Nothing in the documents that is a figure
of ours is typed by hand. What was measured on a CPU is a ratio, which another machine gives again,
more or less, unlike milliseconds.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from fnmatch import fnmatch
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path
from statistics import median
from textwrap import dedent
from types import FunctionType
from typing import Any

import typer
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.explanation import Explanation
from d2ldev_conformance.methods import Verdict, judge_methods, list_methods
from d2ldev_conformance.mutants import MUTANTS
from d2ldev_conformance.progress import count_by_module
from d2ldev_conformance.runs import Run, name_gpus, platform_of, select_newest
from d2ldev_conformance.schema import read_report
from d2ldev_conformance.trials import UNTRIED

import d2ldev.framework
from d2ldev import Backend
from d2ldev.cli.main import app
from d2ldev.contract.framework import ABILITIES
from d2ldev.framework import (
    Devices,
    Files,
    Framework,
    Learner,
    Models,
    Parallel,
    Strict,
    Tensors,
    Training,
)
from d2ldev.framework.testing import MODULES
from d2ldev.registry.discovery import rank

ROOT = Path(__file__).parent.parent
AREAS = (Framework, Devices, Tensors, Models, Files, Strict, Training, Learner, Parallel)
BUILT = [ROOT / "docs" / "requirements.md", ROOT / "docs" / "speed-tables.md"]
DOCUMENTS = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*BUILT})]
SOURCE = "../d2ldev"
"""What the documents install: a checkout, until a release makes this "d2ldev"."""
_INSTALLED = re.compile(r"""(pip install ["']?)(?:\.\./)?d2ldev(?=[\["'`\s])""")


def main(page: Path | None = None) -> None:
    """Rewrite the tables in the README and in ``docs``; or print one page with its tables."""
    if page is not None:
        typer.echo(with_tables(page.read_text(encoding="utf-8")))
        return
    for path in DOCUMENTS:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """Return a document with its tables as the results have them, and with its install lines."""
    text = _INSTALLED.sub(rf"\g<1>{SOURCE}", text)
    tables = {
        "install": install_rows(),
        "support": support_rows(),
        "support-summary": support_summary_rows(),
        "old-reports": old_report_rows(text),
        "modules": module_rows(),
        "methods": method_rows(),
        "limits": limit_rows(),
        "mutants": mutant_rows(),
        "not-run": not_run_rows(),
        "versions": version_rows(),
        "overhead": overhead_rows(),
        "overhead-in-short": overhead_in_short_rows(),
        "log": ratio_rows("device-log-*"),
        "training": ratio_rows("training-*"),
        "files": ratio_rows("files-*"),
        "scaling": ratio_rows("scaling-*"),
        "growth": ratio_rows("growth-*"),
        "transfers": ratio_rows("transfers-*"),
        "epochs": epoch_rows(),
        "small-calls": small_call_rows(),
        "speed-summary": speed_summary_rows(),
        "speed-misses": speed_miss_rows(),
        "zoo": zoo_rows(),
        "zoo-refused": zoo_refusal_rows(),
        "requirements": requirement_rows(),
        "interface": interface_rows(),
        "abilities": ability_rows(),
        "helpers": helper_rows(),
        **option_tables(),
        "peers": chain(peer_rows(_results("peers-*")), _circumstances("peers-*")),
    }
    for name, rows in tables.items():
        if f"<!-- {name} -->" not in text:  # rows that nobody asks for are not computed
            continue
        block = "\n".join([f"<!-- {name} -->", *rows, f"<!-- end of {name} -->"])
        pattern = rf"<!-- {name} -->.*?<!-- end of {name} -->"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def install_rows() -> Iterator[str]:
    """Return what a reader has to know of the install lines; nothing once an index has d2ldev."""
    if SOURCE != "d2ldev":
        yield f"No package index has d2ldev yet: `{SOURCE}` is a checkout of its repository, beside"
        yield "your program. The line works inside of the checkout, too."


def option_tables() -> dict[str, Iterator[str]]:
    """Return the tables of options: ``options-NAME`` for each command, and ``options-d2ldev``."""
    group: Any = typer.main.get_command(app)
    return {
        f"options-{name}": _option_rows(command)
        for name, command in {"d2ldev": group, **group.commands}.items()
    }


def _option_rows(command: Any) -> Iterator[str]:
    yield "| option | meaning |"
    yield "|---|---|"
    for each in command.params:
        is_option = each.param_type_name == "option"
        value = f" {each.metavar}" if each.metavar and is_option else each.metavar or ""
        name = ", ".join(each.opts) + value if is_option else value
        yield f"| `{name}` | {each.help} |"


def requirement_rows() -> Iterator[str]:
    """Return the requirements of the suite: a chapter for each module, a table for each file."""
    anchors: set[str] = set()
    for module, in_module in groupby(list_explanations(), key=lambda each: each.file.module):
        yield from (f"## {module.title()}", "")
        for file, in_file in groupby(in_module, key=lambda each: each.file):
            yield from (f"### {file.name[0].upper()}{file.name[1:]}", "")
            yield from (_write_code(f"{file.title} {file.reason}"), "")
            yield "| requirement | a backend has to | because | source |"
            yield "|---|---|---|---|"
            rows = sorted(in_file, key=lambda each: each.id)
            for id, tests in groupby(rows, key=lambda each: each.id):  # noqa: A001
                # A requirement may have tests in two files.
                anchor = "" if id in anchors else f'<a id="{id}"></a>'
                anchors.add(id)
                yield f"| {anchor}`{id}` | {' | '.join(_explanation_cells([*tests]))} |"
            yield ""


def interface_rows() -> Iterator[str]:
    """Return a chapter for each class that authors of backends derive from."""
    for area in AREAS:
        yield from (f"## {area.__name__}", "", *_write_docstring(area))
        for name, method in _list_members(area):
            is_required = getattr(method, "__isabstractmethod__", False)
            mark = "**Required.** " if is_required else ""
            yield from (f"### {area.__name__}.{name}", "", *_write_member(name, method, mark))
            yield from () if is_required else _write_default(method)


def ability_rows() -> Iterator[str]:
    """Return the names for ``Framework.cannot``, with what users lack then."""
    yield "| name | without it there is no |"
    yield "|---|---|"
    for name, told in ABILITIES.items():
        yield f"| `{name!r}` | {_write_code(told)} |"


def helper_rows() -> Iterator[str]:
    """Return a section for each name of ``d2ldev.framework`` that is on no other page."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "d2ldev").rglob("*.py"))
    told = dict(each for text in sources for each in _read_comments(ast.parse(text)))
    for name in d2ldev.framework.__all__:
        value = getattr(d2ldev.framework, name)
        if value in AREAS or inspect.ismodule(value):
            continue
        yield from (f"### {name}", "")
        if name in told:
            yield from (f"`{value!r}`", "") if type(value) in (int, float, str, tuple) else ()
            yield from _write_paragraphs(told[name])
            continue
        yield from _write_member(name, value)
        for member, each in _list_members(value):
            yield from _write_member(f"{name}.{member}", each)


_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\n", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.+(?:\n     +\S.*)*)", re.MULTILINE)


def _list_members(value: object) -> Iterator[tuple[str, Any]]:
    """Return the methods and properties that a class has of its own, by their names."""
    kinds = (FunctionType, property, cached_property)
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if isinstance(member, kinds) and not name.startswith("_"):
            yield name, member


def _write_member(name: str, value: Any, mark: str = "") -> Iterator[str]:
    """Return the signature of a function or a class as Markdown, and its docstring."""
    yield from (f"{mark}`{name}{_list_arguments(value)}`", "", *_write_docstring(value))


def _write_docstring(obj: object) -> Iterator[str]:
    """Return a docstring as Markdown: its text, then the arguments, the result and the errors."""
    text, *sections = _SECTION.split(inspect.getdoc(obj) or "")
    yield from _write_paragraphs(text)
    for kind, lines in zip(sections[::2], sections[1::2], strict=True):
        verb = {"Args": "", "Attributes": ""}.get(kind, kind.lower())
        found = _ENTRY.findall(lines) if kind in ("Args", "Attributes", "Raises") else [("", lines)]
        for names, told in found:
            written = ", ".join(f"`{name}`" for name in names.split(", ") if name)
            yield f"- {f'{verb} {written}'.strip()}: {_join(told)}"
    comments = [*_read_comments(_parse(obj))] if inspect.isclass(obj) else []
    for name, told in comments:
        yield f"- `{name}`: {_join(told)}"
    yield from [""] if sections or comments else []


def _write_paragraphs(text: str) -> Iterator[str]:
    """Return the paragraphs of a docstring as Markdown."""
    for paragraph in filter(None, dedent(text).strip().split("\n\n")):
        is_code = paragraph.startswith(">>>")
        yield from ("```text", paragraph, "```") if is_code else [_join(paragraph)]
        yield ""


def _join(paragraph: str) -> str:
    """Return a paragraph as one line; a list keeps its lines."""
    lines = paragraph.strip()
    return (lines if lines.startswith("- ") else " ".join(lines.split())).replace("``", "`")


class _Words(str):
    """A text whose ``repr`` is the text itself, for ``inspect.Signature``."""

    __repr__ = str.__str__


def _list_arguments(function: Any) -> str:
    """Return the arguments of a function with their types, without ``self``, and its result."""
    if not inspect.isfunction(function) and Enum in getattr(function, "__mro__", (Enum,)):
        return ""  # of a property, or an enumeration
    try:
        found = inspect.signature(function)
    except ValueError:  # of a class of ``ctypes``
        return ""
    plain = [
        each.replace(annotation=_name_type(each.annotation), default=_name_default(each.default))
        for each in found.parameters.values()
        if each.name != "self"
    ]
    returned = found.empty if inspect.isclass(function) else _name_type(found.return_annotation)
    return str(inspect.Signature(plain, return_annotation=returned))


def _name_type(annotation: Any) -> Any:
    """Return an annotation as its source has it: that of a ``NamedTuple`` is a reference."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Words(text) if isinstance(text, str) else annotation


def _name_default(value: Any) -> Any:
    """Return the default of an argument; of a function or a member of an enumeration its name."""
    name = str(value) if isinstance(value, Enum) else getattr(value, "__name__", "")
    return _Words(name) if name and value is not inspect.Parameter.empty else value


def _write_default(method: Any) -> Iterator[str]:
    """Return what a method that an author leaves out does, if it is one statement."""
    match _parse(getattr(method, "func", getattr(method, "fget", method))).body[1:]:
        case []:
            yield from ("Default: it does nothing.", "")
        case [ast.Return() as statement]:
            yield from (f"Default: `{ast.unparse(statement)}`", "")


def _parse(obj: Any) -> Any:
    """Return the definition of a class or a function."""
    return ast.parse(dedent(inspect.getsource(obj))).body[0]


def _read_comments(tree: Any) -> Iterator[tuple[str, str]]:
    """Return the names of the constants of a module or a class, and the docstrings below them."""
    for node, after in pairwise(tree.body):
        match node, after:
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(ast.Constant(str() as text)),
            ):
                yield name, text


def _explanation_cells(tests: list[Explanation]) -> tuple[str, ...]:
    """Return what the tests of a requirement ask, why if that is not their file's, and by what."""
    reasons = dict.fromkeys(each.reason for each in tests if each.reason != each.file.reason)
    sources = dict.fromkeys(f"[{each.source}]({each.link})" for each in tests)
    return (
        _write_code(" ".join(each.asks for each in tests)),
        _write_code(" ".join(reasons)),
        ", ".join(sources),
    )


def _write_code(text: str) -> str:
    """Return the text of a docstring as Markdown, in a cell of a table."""
    return text.replace("``", "`").replace("|", "\\|")


def support_rows() -> Iterator[str]:
    """Return one row for each backend, from the newest report on each platform."""
    yield "| backend | on the CPU | on two virtual GPUs | on CUDA | versions, date |"
    yield "|---|---|---|---|---|"
    folder = ROOT / "conformance" / "results"
    reasons = tomllib.loads((folder / "not_run.toml").read_text(encoding="utf-8"))
    for backend, on in sorted(group_reports().items()):
        without = reasons.get(backend, {})
        number = max(len(report["requirements"]) for report in on.values())
        cells = [
            _outcome(on[platform], number) if platform in on else without.get(platform, "not run")
            for platform in ("cpu", "virtual", "cuda")
        ]
        # What ran on a card has its own versions and its own date, in its cell.
        elsewhere = [on[platform] for platform in on if platform != "cuda"] or [*on.values()]
        last = max(elsewhere, key=lambda report: str(report["date"]))
        yield f"| {backend} | {' | '.join(cells)} | {_versions(last)}; {last['date'][:10]} |"


def support_summary_rows() -> Iterator[str]:
    """Return one row for each backend, with what passed and failed in the newest reports."""
    yield "| backend | on the CPU | on two virtual GPUs | on CUDA |"
    yield "|---|---|---|---|"
    for backend, on in sorted(group_reports().items()):
        number = max(len(report["requirements"]) for report in on.values())
        cells = [
            _short_outcome(on[platform], number) if platform in on else "not run"
            for platform in ("cpu", "virtual", "cuda")
        ]
        yield f"| {backend} | {' | '.join(cells)} |"


def _short_outcome(report: Run, number: int) -> str:
    """Return how many requirements passed, failed and were not run, and on which card."""
    counts = _count(report, number)
    told = ("passed", "failed", "not run")
    text = ", ".join(f"{counts[each]} {each}" for each in told if counts[each])
    cards = ", ".join(card.partition(" (")[0] for card in report["cards"])
    return f"{text}; {cards}" if cards else text


OLD = 200
"""How many commits a report on hardware may be behind, before the documents call it old."""


def old_report_rows(text: str) -> Iterator[str]:
    """Return a line that names the reports on hardware that are old.

    The age comes from the history of the checkout. Where that is not whole, as in the archive of a
    release, the line stays as it is in the document.

    Args:
        text: of the document.
    """
    if not _has_history():
        found = re.search(r"<!-- old-reports -->\n(.*?)<!-- end", text, re.DOTALL)
        yield from found[1].splitlines() if found else ()
        return
    old = [
        f"{backend} ({on['cuda']['commit'] or 'of no commit'})"
        for backend, on in sorted(group_reports().items())
        if "cuda" in on and _is_old(on["cuda"]["commit"])
    ]
    if old:
        yield f"Reports on CUDA that are old, more than {OLD} commits behind: {', '.join(old)}."


def _has_history() -> bool:
    """Return whether this is a checkout with all commits."""
    if not (ROOT / ".git").exists():  # git would find a repository around an archive
        return False
    return _run_git("rev-parse", "--is-shallow-repository") == "false"


def _is_old(commit: str) -> bool:
    """Return whether too many commits came after one; also if it is not in the history."""
    name = commit.removesuffix("-dirty")
    number = re.fullmatch("[0-9a-f]+", name) and _run_git("rev-list", "--count", f"{name}..HEAD")
    return not number or int(number) > OLD


def _run_git(*arguments: str) -> str:
    """Return the output of git; empty if it fails, or is not there."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _count(report: Run, number: int) -> dict[str, int]:
    """Return how many requirements have each outcome; what the report lacks was not run either."""
    lacks = number - len(report["requirements"])
    return {**report["summary"], "not run": report["summary"].get("not run", 0) + lacks}


def group_reports() -> dict[str, dict[str, Run]]:
    """Return the newest reports: backend -> platform -> report."""
    reports: dict[str, dict[str, Run]] = {}
    for report in newest_reports():
        reports.setdefault(report["backend"], {})[platform_of(report)] = report
    return reports


def newest_reports() -> list[Run]:
    """Return the newest kept report of each backend on each platform."""
    kept = sorted((ROOT / "conformance" / "results").glob("*.json"))
    return select_newest([read_report(path) for path in kept])


def module_rows() -> Iterator[str]:
    """Return one row for each of the newest reports, with the requirements of each module."""
    yield f"| backend | on | {' | '.join(MODULES)} |"
    yield "|---" * (len(MODULES) + 2) + "|"
    for report in newest_reports():
        counts = count_by_module(report["requirements"])
        cells = [_count_passed(counts[module]) if module in counts else "" for module in MODULES]
        yield f"| {report['backend']} | {name_gpus(report)} | {' | '.join(cells)} |"


_PLATFORMS = {"cpu": "the CPU", "virtual": "virtual GPUs", "cuda": "CUDA"}
# A method with a known gap has passed the other requirements about it, if any.
_MARKS = {"passed": "✓", "failed": "✗", "not begun": "✗", "not run": "·"}


def judge_reports() -> dict[tuple[str, str], dict[str, Verdict]]:
    """Return (backend, platform) -> method -> what the newest report says of it."""
    requirements = [each.id for each in list_explanations()]
    return {
        (report["backend"], platform_of(report)): dict(judge_methods(report, requirements))
        for report in newest_reports()
    }


def method_rows() -> Iterator[str]:
    """Return one row for each method: for each backend a mark for each platform."""
    judged = judge_reports()
    backends = sorted({backend for backend, _ in judged}, key=rank)
    yield f"| method | {' | '.join(backends)} |"
    yield "|---" * (len(backends) + 1) + "|"
    methods = list_methods(each.id for each in list_explanations())
    own = [name for name in vars(Backend) if name in methods]
    without = [
        name
        for name, value in vars(Backend).items()
        if callable(value) and not name.startswith("_") and name not in methods
    ]
    for method in [*own, *without, *sorted({*methods} - {*own})]:
        cells = [
            "".join(
                _mark(judged.get((backend, platform), {}).get(method)) for platform in _PLATFORMS
            )
            for backend in backends
        ]
        yield f"| `{method}` | {' | '.join(cells)} |"


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return "·"
    return _MARKS.get(verdict.outcome) or ("◐" if verdict.passed else "∅")


def mutant_rows() -> Iterator[str]:
    """Return one row for each mutant, with what became of it in each backend that was tried."""
    kept = sorted((ROOT / "conformance" / "results" / "mutants").glob("*.json"))
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in kept]
    found = {
        each["backend"]: {row["mutant"]: row["outcome"] for row in each["mutants"]}
        for each in documents
    }
    backends = sorted(found, key=rank)
    yield f"| {' | '.join(['mutant', 'it does wrong', *backends])} |"
    yield "|---" * (len(backends) + 2) + "|"
    for mutant in MUTANTS.values():
        cells = [found[backend].get(mutant.name, "not tried") for backend in backends]
        yield f"| {' | '.join([f'`{mutant.name}`', mutant.fault, *cells])} |"
    counts = [count_caught(found[backend].values()) for backend in backends]
    yield f"| {' | '.join(['caught', 'of those that were tried', *counts])} |"


def count_caught(outcomes: Iterable[str]) -> str:
    """Return how many of the mutants that a backend was tried with were caught: ``'17 of 17'``."""
    tried = [each for each in outcomes if each not in UNTRIED]
    return f"{tried.count('caught')} of {len(tried)}"


def limit_rows() -> Iterator[str]:
    """Return a chapter for each backend: what it does not pass, where, and why."""
    found: dict[str, dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]]] = {}
    for (backend, platform), verdicts in judge_reports().items():
        for method, verdict in verdicts.items():
            for outcome, requirement, reason in verdict.reasons:
                # A limit that a backend declares is one of many requirements.
                key = requirement if outcome == "failed" else reason
                limits = found.setdefault(backend, {})
                named = limits.setdefault((outcome, key), ({}, {}))
                named[0][_PLATFORMS[platform]] = named[1][f"`{method}`"] = None
    for backend in sorted(found, key=rank):
        yield from ("", f"### {backend}", "")
        for (outcome, key), (platforms, methods) in sorted(found[backend].items()):
            why = f"`{key}` fails" if outcome == "failed" else _write_reason(key, backend)
            where = ", ".join(platforms)
            yield f"- {', '.join(methods)} on {where}: {_WORDS.get(outcome, '')}{why}."
    yield ""


_WORDS = {"known gap": "known gap: "}


def _write_reason(reason: str, backend: str) -> str:
    """Return a reason without the name of the backend, and its addresses as links."""
    text = reason.removeprefix(f"the {backend} backend ").strip()
    return re.sub(r"\((https?://\S+)\)", r"([issue](\1))", text)


def not_run_rows() -> Iterator[str]:
    """Return one line for each backend without a report of a platform, with the reason."""
    kept = ROOT / "conformance" / "results" / "not_run.toml"
    reasons = tomllib.loads(kept.read_text(encoding="utf-8"))
    judged = judge_reports()
    for backend in sorted({backend for backend, _ in judged}, key=rank):
        for platform, name in _PLATFORMS.items():
            if (backend, platform) not in judged:
                reason = reasons.get(backend, {}).get(platform, "not run")
                yield f"- {backend} on {name}: {reason}."


def _count_passed(count: Counter[str]) -> str:
    """Return how many requirements of a module passed, and how many failed."""
    failed = f", **{count['failed']} failed**" if count["failed"] else ""
    return f"{count['passed']} of {count.total()}{failed}"


def _outcome(report: Run, number: int) -> str:
    """Return how many requirements passed, failed and so on, and on which card and when.

    Args:
        report: of one run, which may have been cut short or be older than some requirements.
        number: of requirements that the backend's other reports have.
    """
    counts = _count(report, number)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    if not report["cards"]:
        return text
    return f"{text}; {', '.join(report['cards'])}, {_versions(report)}; {report['date'][:10]}"


def _versions(report: Run) -> str:
    """Return the versions that a report was made with, but d2ldev's own."""
    return ", ".join(f"{name} {x}" for name, x in report["versions"].items() if name != "d2ldev")


def version_rows() -> Iterator[str]:
    """Return one row for each version that was tried, with what came of it."""
    yield "| backend | Python | installed | modules of the suite | outcome | date |"
    yield "|---|---|---|---|---|---|"
    text = (ROOT / "conformance" / "versions.toml").read_text(encoding="utf-8")
    folder = ROOT / "conformance" / "results" / "versions"
    kept = [result for _, result in documents(folder)]
    for row in tomllib.loads(text)["rows"]:
        asked = {name: row[name] for name in ("backend", "python", "install")}
        result = next((each for each in kept if each["row"] == asked), None)
        yield f"| {' | '.join(_version_cells(asked, result))} |"


def _version_cells(row: dict[str, Any], result: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the cells of a row of the versions."""
    pins = ", ".join(each.replace("==", " ") for each in row["install"])
    if result is None:
        return row["backend"], row["python"], pins, "", "not run", ""
    if not result["summary"]:
        return row["backend"], row["python"], pins, "", result["outcome"], result["date"]
    found = result["versions"]
    told = ("flax", "jax", "keras", "mxnet", "numpy", "optax", "tensorflow-cpu", "torch")
    versions = ", ".join(f"{name} {found[name]}" for name in told if name in found)
    modules = (
        result["selected"].partition(" and not ")[0].strip("()").replace(" or ", ", ") or "all"
    )
    counted = [f"{count} {outcome}" for outcome, count in result["summary"].items() if count]
    where = f"{result['gpus']} virtual GPUs" if result["gpus"] else "the CPU"
    own = f"; its own tests {result['own']}" if result["own"] else ""
    outcome = f"{result['outcome']} on {where}: {', '.join(counted)}{own}"
    return row["backend"], found["python"], versions, modules, outcome, result["date"]


def overhead_rows() -> Iterator[str]:
    """Return one row for each comparison of the benchmark through the handle."""
    yield "| framework | what | with d2ldev | without | ratio | aim |"
    yield "|---|---|---|---|---|---|"
    for framework, result in _sort_missed_first(_results("overhead-*")):
        if result["value"] is None:
            continue
        ours, theirs = (
            f"`{_in_a_cell(result[side])}`" for side in ("ours_statement", "theirs_statement")
        )
        yield f"| {framework} | {_name(result)} | {ours} | {theirs} | {_explain(result)} |"
    yield from _circumstances("overhead-*")


# The calls in short: the files of their results, and the names of these.
OVERHEAD = {
    "to: a tensor that is there": ("overhead-*", "to, a tensor already there"),
    "to: a batch that is there": ("overhead-*", "to, a batch already there"),
    "to: 30 tensors, gpu:0 to gpu:1": ("overhead-*", "to, gpu:0 to gpu:1: dict of 30, *"),
    "ones": ("overhead-*", "ones"),
    "place: 50 layers": ("overhead-*", "place, 50 layers*"),
    "strict: a training step": ("overhead-*", "strict: a training step"),
    "fit: an epoch of an MLP": ("training-*", "an epoch of an MLP*"),
    "fit: an epoch of LeNet": ("training-*", "an epoch of LeNet*"),
}


def find_overhead(label: str) -> dict[str, float]:
    """Return the median ratio of a call in each framework.

    Args:
        label: a key of ``OVERHEAD``.
    """
    files, name = OVERHEAD[label]
    found: dict[str, list[float]] = {}
    for framework, result in _results(files):
        if fnmatch(result["name"], name) and result["unit"] == "ratio":
            found.setdefault(framework, []).append(result["value"])
    return {framework: median(ratios) for framework, ratios in found.items()}


def overhead_in_short_rows() -> Iterator[str]:
    """Return one row for each call of ``OVERHEAD``, with the ratio of each framework."""
    frameworks = ("torch", "jax", "tensorflow", "mxnet")
    yield f"| what | {' | '.join(frameworks)} |"
    yield "|---" * (len(frameworks) + 1) + "|"
    for label in OVERHEAD:
        ratios = find_overhead(label)
        cells = (f"{ratios[name]:.3g}" if name in ratios else "" for name in frameworks)
        yield f"| {label} | {' | '.join(cells)} |"


def ratio_rows(files: str) -> Iterator[str]:
    """Return one row for each comparison in the files of that name."""
    yield "| framework | what | against | ratio | aim |"
    yield "|---|---|---|---|---|"
    for framework, result in _sort_missed_first(_results(files)):
        against = _in_a_cell(result["theirs_statement"])
        yield f"| {framework} | {_name(result)} | {against} | {_explain(result)} |"
    yield from _circumstances(files)


# What the files of that name compare.
COMPARED = {
    "overhead-*": "calls",
    "device-log-*": "a log of each step",
    "training-*": "training",
    "files-*": "files, against safetensors",
    "scaling-*": "two processes",
    "growth-*": "slopes of growth",
    "peers-*": "the same work by other libraries",
    "transfers-*": "moving to a GPU",
    "epochs-*": "an epoch on a GPU",
    "small_calls-*": "small calls on a GPU",
}


def _judge(files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each result in files of that name that has an aim, with its framework."""
    for framework, result in _results(files):
        if result["met"] is not None and result["unit"] in ("ratio", "slope"):
            yield framework, result
    for _, document in documents(ROOT / "benchmarks" / "results" / "cuda", files):
        for row in document["results"]:
            ratio = row["ratios"]["d2ldev"] if "ratios" in row else row["ratio"]
            if row["aim"] is not None:
                yield _framework(document), _comparison(ratio, row["aim"])


def speed_summary_rows() -> Iterator[str]:
    """Return one row for each kind of comparison, with the median of each framework."""
    frameworks = sorted({framework for files in COMPARED for framework, _ in _judge(files)})
    yield f"| what | {' | '.join(frameworks)} |"
    yield "|---" * (len(frameworks) + 1) + "|"
    for files, what in COMPARED.items():
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in frameworks}
        for framework, result in _judge(files):
            found[framework].append(result)
        yield f"| {what} | {' | '.join(_median_cell(each) for each in found.values())} |"


def _median_cell(results: list[dict[str, Any]]) -> str:
    """Return the median of some results, and how many of them miss their aim."""
    if not results:
        return ""
    missed = sum(result["met"] is False for result in results)
    text = f"{median(result['value'] for result in results):.3g}"
    return (
        f"{text}, {missed} of {len(results)} miss" if missed else f"{text}, all {len(results)} meet"
    )


def speed_miss_rows() -> Iterator[str]:
    """Return one row for each reason of each framework, with the worst of what misses its aim."""
    yield "| framework | what | how many | the worst | its aim | why |"
    yield "|---|---|---|---|---|---|"
    for files, what in COMPARED.items():
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for framework, result in _results(files):
            if result["met"] is False:
                why = result["reason"] or result["note"] or "not explained"
                groups.setdefault((framework, why), []).append(result)
        for (framework, why), results in groups.items():
            worst = max(results, key=lambda result: result["value"] / (result["aim"] or 1))
            name = _in_a_cell(worst["name"])
            figures = _figure(worst).removesuffix(" **missed**")
            yield f"| {framework} | {what}: {name} | {len(results)} | {figures} | {why} |"


def epoch_rows() -> Iterator[str]:
    """Return one row for each model that was trained on a GPU, with the ratios of all loops."""
    peers = ("accelerate", "fabric")
    yield f"| framework | model | batches | {' | '.join(peers)} | d2ldev | aim |"
    yield "|---|---|---|---|---|---|---|"
    for _, document in documents(ROOT / "benchmarks" / "results" / "cuda", "epochs-*"):
        for row in document["results"]:
            ratios, aim = row["ratios"], row["aim"]
            memory = "pinned" if row["pinned"] else "pageable"
            cells = " | ".join(f"{ratios[loop]:.3g}" if loop in ratios else "" for loop in peers)
            ours = _figure(_comparison(ratios["d2ldev"], aim))
            yield f"| {_framework(document)} | {row['name']} | {memory} | {cells} | {ours} |"
    yield from _circumstances("cuda/epochs-*")


def small_call_rows() -> Iterator[str]:
    """Return one row for each way of a small call on a GPU, but for the first, which is 1."""
    yield "| framework | what | how | ratio | aim |"
    yield "|---|---|---|---|---|"
    for _, document in documents(ROOT / "benchmarks" / "results" / "cuda", "small_calls-*"):
        name = first = ""
        for row in document["results"]:
            if row["name"] != name:
                name, first = row["name"], row["way"]
                continue
            what = f"{_framework(document)} | {row['name']} | {row['way']}, against {first}"
            yield f"| {what} | {_figure(_comparison(row['ratio'], row['aim']))} |"
    yield from _circumstances("cuda/small_calls-*")


def _comparison(ratio: float, aim: float | None) -> dict[str, Any]:
    """Return a ratio and its aim as ``_figure`` takes them."""
    return {
        "value": ratio,
        "aim": aim,
        "met": None if aim is None else ratio <= aim,
        "unit": "ratio",
    }


def _sort_missed_first(
    results: Iterable[tuple[str, dict[str, Any]]],
) -> list[tuple[str, dict[str, Any]]]:
    return sorted(results, key=lambda each: each[1]["met"] is not False)


def _circumstances(files: str) -> Iterator[str]:
    """Return when, on what and with what each of the files was measured."""
    lines = []
    for _, document in documents(ROOT / "benchmarks" / "results", files):
        there = [f"{name} {version}" for name, version in document["versions"].items() if version]
        what = ", ".join([document["machine"], f"Python {document['python']}", *there])
        lines.append(f"- {_framework(document)}: {document['date']}, {what}")
    yield ""
    yield from dict.fromkeys(lines)  # one for two files that were measured together


def _name(result: dict[str, Any]) -> str:
    """Return what was measured, with what to know about it."""
    return f"{result['name']} ({result['note']})" if result["note"] else str(result["name"])


def peer_rows(results: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Return one row for each comparison with a peer: those that miss their aim come first.

    Args:
        results: of the benchmark of the peers, each with its framework.
    """
    columns = ("what", "against", "ratio", "half of the rounds", "aim")
    yield f"| framework | {' | '.join(columns)} | why |"
    yield "|---|---|---|---|---|---|---|"
    for framework, result in _sort_missed_first(results):
        if result["value"] is None:
            figures = f" | | {result['aim']:g}"
        else:
            ratio, aim = _figure(result).split(" | ")
            low, high = result["spread"]
            figures = f"{ratio} | {low:.3g} to {high:.3g} | {aim}"
        what = f"{framework} | {result['name']} | {result['against']}"
        why = result["note"] or ("not explained" if result["met"] is False else "")
        yield f"| {what} | {figures} | {why} |"


def _figure(result: dict[str, Any]) -> str:
    """Return the cells of the ratio and of its aim, which is marked where it is missed."""
    value, aim, unit = result["value"], result["aim"], result["unit"]
    if unit == "ms more":  # a time, of which the aim is the measure, also for its floor
        value, aim, unit = value / result["measure"], aim and 1, "of the aim"
    number = 3
    while result["met"] is False and float(f"{value:.{number}g}") == aim:
        number += 1
    digits = f"{value:.{number}g}"
    shown = digits if unit == "ratio" else f"{digits} {unit}"
    missed = " **missed**" if result["met"] is False else ""
    return f"{shown} | {'' if aim is None else f'{aim:g}'}{missed}"


def _explain(result: dict[str, Any]) -> str:
    """Return what ``_figure`` does, with the reason why an aim is missed."""
    return _figure(result) + (f": {result['reason']}" if result["reason"] else "")


def zoo_rows() -> Iterator[str]:
    """Return one row for each package of models that others wrote, and what it was tried with."""
    yield "| package | models | right | refused | not right |"
    yield "|---|---|---|---|---|"
    lines, total = [], Counter[str]()
    for _, document in documents(ROOT / "conformance" / "results" / "zoo"):
        for package, group in groupby(document["results"], key=lambda each: each["package"]):
            count = Counter(each["outcome"] for each in group)
            total += count
            yield f"| {package} | {_count_cells(count)} |"
        there = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        lines.append(f"- {document['date']}, Python {document['python']}, {there}")
    yield f"| together | {_count_cells(total)} |"
    yield from ("", *lines)


def _count_cells(count: Counter[str]) -> str:
    numbers = count.total(), count["right"], count["refused"], count["wrong"] + count["failed"]
    return " | ".join(str(number) for number in numbers)


def zoo_refusal_rows() -> Iterator[str]:
    """Return one row for each reason why a model of others is refused, or is not right."""
    yield "| what | models | why |"
    yield "|---|---|---|"
    models: dict[tuple[str, str], dict[str, None]] = {}
    for _, document in documents(ROOT / "conformance" / "results" / "zoo"):
        for result in document["results"]:
            for check, message in result["messages"].items():
                reason = result["reasons"][check] or f"Not yet: {_in_a_cell(message)}"
                models.setdefault((check, reason), {})[f"`{result['model']}`"] = None
    for (check, reason), names in models.items():
        yield f"| {check} | {', '.join(names)} | {reason} |"


def _in_a_cell(statement: str) -> str:
    """Return a statement on one line, with its vertical bars replaced."""
    return "; ".join(statement.split("\n")).replace("|", "/")


def _results(files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each result of the benchmarks in files of that name, with its framework."""
    known = [*reasons()]
    for name, document in documents(ROOT / "benchmarks" / "results", files):
        aims = [x["aim"] for x in document["results"] if x["unit"] == "ms more" and x["aim"]]
        for result in document["results"]:
            measure = aims[0] if aims else None
            reason = reason_of(name, result, known)
            yield _framework(document), {**result, "measure": measure, "reason": reason}


def reason_of(file: str, result: dict[str, Any], known: Iterable[tuple[str, str, str]]) -> str:
    """Return why a result misses its aim; empty if it does not, or none of ``reasons`` says why."""
    if result["met"] is not False:
        return ""
    return next((why for files, row, why in known if is_of(file, result, files, row)), "")


def reasons() -> Iterator[tuple[str, str, str]]:
    """Yield of which files and of which rows a reason is, and the reason."""
    text = (ROOT / "benchmarks" / "results" / "reasons.toml").read_text(encoding="utf-8")
    for reason in tomllib.loads(text)["reason"]:
        yield reason["files"], reason["row"], reason["why"]


def is_of(file: str, result: dict[str, Any], files: str, row: str) -> bool:
    """Return whether a reason's files and rows are those of a result."""
    return fnmatch(file, files) and str(result["name"]).startswith(row)


def _framework(document: dict[str, Any]) -> str:
    """Return the framework of a document: the first of its distributions that is not d2ldev."""
    framework = next(name for name in document["versions"] if name != "d2ldev")
    return str(framework).removesuffix("-cpu")


def documents(folder: Path, files: str = "*") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results in files of that name, each with the file's own name, without its end."""
    for path in sorted(folder.glob(f"{files}.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
