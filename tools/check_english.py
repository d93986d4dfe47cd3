"""Check the English of documents, docstrings, comments, error messages and help texts.

``python tools/check_english.py`` checks the paths of ``PATHS``, and exits with 1 after a problem.
Name paths to check those alone.
Vale could do the same, but its package downloads a binary at first use.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST = 20
PATHS = (
    *("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "docs"),
    *("changelog.d", "d2ldev", "backends", "conformance/d2ldev_conformance"),
    *("tools/check_english.py", "tools/first_command.py", "tools/release.py", "tools/terminal.py"),
)

# What a sentence must not hold, and what to write instead.
RULES = {
    r"\b(?<!there )(?:is|are) (?:(?-i:none)|no (?!longer|more|less|\w+er\b)\w+)\b": "not a ...",
    r"\bof (?:which|whom)\b": "name the noun, or write two sentences",
    r"^what (?:\w+ ){1,6}?(?:is|are)\b(?!.*\?)": "begin with the noun, not with 'what ... is'",
    r"^who (?!.*\?)": "write 'a caller that ...' or 'you'",
    r"\bby day\b": "daily",
    r"\b(?:at|by) night\b": "nightly",
    r"\bspared\b": "skip",
    r"\bmended\b": "fixed",
    r"\bspel(?:t|led) (?:so|otherwise)\b": "name what is invalid",
    r"\bthe house\b": "the code, the package",
    r"\brooms?\b": "area, module",
    r"\bdoes nothing then\b|\bto no effect\b": "no-op",
    r"\bwhereabouts\b": "device",
    r"\b(?:JAX|Flax|Keras|optax|NumPys)'(?= )": "JAX's, Flax's, Keras's, Optax's",
}
COMPILED = [(re.compile(pattern, re.IGNORECASE), fix) for pattern, fix in RULES.items()]


def main(arguments: list[str]) -> int:
    """Check all paths, or those that are named."""
    problems = [line for path in arguments or PATHS for line in check_path(ROOT / path)]
    sys.stdout.writelines(f"{line}\n" for line in problems)
    return int(bool(problems))


def find_files(path: Path) -> list[Path]:
    """Return the documents and modules under a path."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SystemExit(f"{path} does not exist: correct PATHS")
    return sorted(file for file in path.rglob("*") if file.suffix in {".md", ".py"})


def check_path(path: Path) -> list[str]:
    """Return the problems of all files under a path."""
    return [line for file in find_files(path) for line in check_file(file)]


def check_file(path: Path) -> list[str]:
    """Return the problems of a file, one line each."""
    text = path.read_text(encoding="utf-8")
    read = read_markdown if path.suffix == ".md" else read_python
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [
        f"{name}:{number}: {problem}"
        for number, paragraph in read(text)
        for problem in check_paragraph(paragraph)
    ]


def check_paragraph(paragraph: str) -> Iterator[str]:
    """Yield the problems of a paragraph of plain prose."""
    for sentence in split_sentences(paragraph):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > LONGEST:
            yield f"{len(words)} words: {sentence}"
        for pattern, fix in COMPILED:
            if found := pattern.search(sentence):
                yield f"{found.group()!r} ({fix}): {sentence}"


def split_sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, in which code is one word and a link is its text."""
    text = re.sub(r"(`+).+?\1", "CODE", paragraph, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", " ".join(text.split()))
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf)\.", r"\1", text)
    start = r"[\"'(A-Z0-9]|(?:d2ldev|torch)\b"
    return [part for part in re.split(rf"(?<=[.!?])[\"')]*\s+(?={start})", text) if part]


def read_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph of a document, without code, tables and headings.

    It also leaves out tables between markers, which ``tools/tables.py`` writes.
    """
    text = re.sub(r"^( *)```.*?^\1```$", _blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- end of \1 -->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    yield from join_lines(
        (number, "" if line.lstrip().startswith(("|", "#")) else line)
        for number, line in enumerate(text.splitlines(), 1)
    )


def _blank(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n")


def join_lines(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield paragraphs with their first line: an empty line or a list item begins the next one."""
    start, paragraph = 0, ""
    for number, line in [*lines, (0, "")]:
        item = re.match(r"\s*(?:[-*]|\d+\.)\s+", line)
        if (item or not line.strip()) and paragraph:
            yield start, paragraph
            paragraph = ""
        if line.strip():
            start = start if paragraph else number
            paragraph += ("\n" if paragraph else "") + line[item.end() if item else 0 :].strip()


def read_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of docstrings and comments, and the texts of errors and options."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield from read_docstring(node, docstring)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            names = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            if any(re.search(r"\b(?:attempted|problem|fix)$", ast.unparse(each)) for each in names):
                yield from ((node.lineno, message) for message in [read_string(node.value)])
        elif isinstance(node, ast.Call):
            is_error = re.search(r"(?:Error|Warning|_refusal)$", ast.unparse(node.func))
            texts = [*node.args] if is_error else []
            texts += [each.value for each in node.keywords if each.arg == "help"]
            yield from ((text.lineno, message) for text in texts if (message := read_string(text)))
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"#!|#:? *(?:noqa|type:|pragma|%%)", token.string
        ):
            number, is_alone = token.start[0], token.line.lstrip().startswith("#")
            if comments and (number != comments[-1][0] + 1 or not is_alone):
                comments.append((number - 1, ""))
            comments.append((number, token.string.lstrip("#: ")))
            if not is_alone:
                comments.append((number, ""))
    yield from join_lines(comments)


def read_docstring(node: ast.AST, docstring: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a docstring, without examples and tables."""
    number = 1 if isinstance(node, ast.Module) else node.body[0].lineno  # type: ignore[attr-defined]
    prose = re.sub(r"^ *>>>.*?(?=^\s*$|\Z)", _blank, docstring, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"(?<=::)\n\n(?: +.*\n|\n)+", _blank, prose + "\n")
    # "Args:" and the name of an argument do not belong to a sentence.
    prose = re.sub(r"^ *\w+:$", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"^ *\*{0,2}\w+(, \*{0,2}\w+)*: ", "- ", prose, flags=re.MULTILINE)
    yield from join_lines(
        (number + i, "" if line.lstrip().startswith("|") else line)
        for i, line in enumerate(prose.splitlines())
    )


def read_string(node: ast.expr) -> str:
    """Return the text of a string literal, in which each value is one word, else ''."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "CODE" for each in node.values)
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp):
        return read_string(node.left) + read_string(node.right)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
