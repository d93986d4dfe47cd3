"""Count the lines of each framework's package that use a private name of the framework.

A private name is an attribute with an underscore of an object that is not this project's, or a
module with one in its path, or text with such a name. It may change in any release. ``strict``,
``leaks`` and virtual GPUs are left out, because frameworks have no public way for them. MXNet is
left out, too: it has no new releases.

    python tools/check_private_names.py           # fail unless the numbers are those below
    python tools/check_private_names.py --list    # print the lines
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBERS = {"jax": 12, "tensorflow": 38, "torch": 22}
"""The lines of each package. Lower a number when a line goes."""
LEFT_OUT = {"strict", "leaks", "virtual", "provision"}
# Python's own, which are public in spite of their names.
OF_PYTHON = {"_asdict", "_exit", "_fields", "_replace"}
# Modules of TensorFlow that its documentation does not have.
NOT_DOCUMENTED = ("tensorflow.python", "tf.__internal__")


def is_private(name: str) -> bool:
    """Return whether a name has one underscore in front, and is not Python's or this project's."""
    is_name = re.fullmatch(r"_[A-Za-z]\w*", name) is not None
    return is_name and not name.startswith(("__", "_d2ldev_")) and name not in OF_PYTHON


def list_defined(tree: ast.Module) -> set[str]:
    """Return the private names that a module defines for its own classes and functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_own(node.value) else set()
    return found


def is_own(node: ast.expr) -> bool:
    """Return whether an expression is an object of the class around it."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def list_used(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of a module that use a private name of another project.

    Within this project no module uses those of another module.
    """
    lines, defined = set(), list_defined(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(value=value, attr=attr):
                names = [] if is_own(value) or attr in defined else [attr]
            case ast.ImportFrom(module=str(module), names=aliases):
                names = [*module.split("."), *(each.name for each in aliases)]
                names = [name for name in names if name not in defined]
                names += ["_of_tensorflow"] if module.startswith(NOT_DOCUMENTED) else []
            case ast.Constant(value=str(text)) if text not in defined:
                names = [text]
        if any(map(is_private, names)):
            lines.add(node.lineno)
    return lines


def main(arguments: list[str]) -> int:
    """Print what differs from the numbers, and return the exit status."""
    status = 0
    for name, number in NUMBERS.items():
        package = ROOT / "backends" / f"d2ldev_{name}"
        trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
        found = [
            (path, line)
            for path, tree in trees.items()
            if not LEFT_OUT & {part.removesuffix(".py") for part in path.relative_to(package).parts}
            for line in sorted(list_used(tree))
        ]
        if "--list" in arguments:
            for path, line in found:
                text = path.read_text().splitlines()[line - 1].strip()
                sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: {text}\n")
        if len(found) != number:
            told = f"d2ldev_{name}: {len(found)} lines with private names, not {number}\n"
            sys.stdout.write(told)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
