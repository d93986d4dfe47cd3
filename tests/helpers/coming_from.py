"""The tables of "Coming from another library": their lines, and ours.

``python coming_from.py SECTION...`` runs our lines of the sections, each after the blocks of the
page that define the names. ``python coming_from.py --theirs SECTION IMPORTS`` looks up the names of
theirs.
"""

import ast
import inspect
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from pages import ROOT, find_blocks, make_environment
from processes import extend_path, run_interpreter

PAGE = ROOT / "docs" / "guides" / "coming-from.md"


def read_rows(section):
    """Return the code of the first two cells of each row of a section: theirs and ours."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (?:[^|]+ )?\|$", text, re.MULTILINE)
    assert len(rows) == text.count("\n| `") > 5, section
    return rows


def run_blocks(*backends):
    """Run the blocks of the page for backends; return their names."""
    names = {"__name__": "__main__"}
    for backend in backends:
        for _, _, code in find_blocks(PAGE, backend):
            exec(code, names)
    return names


def find_unknown(code, roots):
    """Return the names of a line, and of its arguments, that a library does not have.

    Args:
        code: the line.
        roots: the object that each name is. The attributes of a class stand for its instances'.
    """
    unknown = []

    def look_up(node):
        if isinstance(node, ast.Name):
            return roots.get(node.id)
        owner = look_up(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None:
            return None
        if not hasattr(owner, node.attr):
            unknown.append(ast.unparse(node))
        return getattr(owner, node.attr, None)

    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            look_up(node)
        if isinstance(node, ast.Call) and (function := look_up(node.func)) is not None:
            with suppress(ValueError):  # written in C, and without a signature
                parameters = inspect.signature(function).parameters
                takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
                keywords = [each.arg for each in node.keywords if each.arg not in parameters]
                unknown += [] if takes_any else keywords
    return [*dict.fromkeys(unknown)]


def run_our_lines(backend, *sections, folder):
    """Run our lines of sections on a backend, in a process of its own."""
    given = make_environment(backend) | {"PYTHONPATH": extend_path([Path(__file__).parent])}
    run_interpreter(__file__, *sections, cwd=folder, env=given)


def look_up_their_names(section, imports, folder):
    """Look up the names of a library's lines, in a process of its own: some imports leave things.

    Args:
        section: the library's.
        imports: the line that defines the names of its lines.
        folder: the working folder.
    """
    given = {**os.environ, "PYTHONPATH": extend_path([Path(__file__).parent])}
    run_interpreter(__file__, "--theirs", section, imports, cwd=folder, env=given)


def main(*sections):
    """Run our lines; print those that fail, and return their number."""
    if sections[0] == "--theirs":
        _, section, imports = sections
        names = {}
        exec(imports, names)
        unknown = [each for code, _ in read_rows(section) for each in find_unknown(code, names)]
        sys.stderr.writelines(f"{section}: {name}\n" for name in unknown)
        return len(unknown)
    failed = 0
    names = run_blocks("reference", *(["tensorflow"] if "Keras 3" in sections else []))
    for section in sections:
        for _, code in read_rows(section):
            try:
                exec(code, dict(names))
            except Exception:
                failed += 1
                sys.stderr.write(f"{section}: {code}\n{traceback.format_exc(limit=-2)}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
