"""Count the lines of each framework's package that use a private name of the framework.

A private name is an attribute with an underscore that this project does not define, or a module
with one in its path. It may change in any release. ``strict``, ``leaks`` and virtual GPUs are left
out, because frameworks have no public way for them. MXNet is left out, too: it has no new releases.

    python tools/check_private_names.py           # fail above a limit
    python tools/check_private_names.py --list    # print the lines
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {"jax": 17, "tensorflow": 36, "torch": 19}
"""The most lines of each package. Lower a limit when a line goes."""
LEFT_OUT = {"strict", "leaks", "virtual", "provision"}
# Python's own, which are public in spite of their names.
OF_PYTHON = {"_asdict", "_exit", "_fields", "_replace"}


def is_private(name: str) -> bool:
    """Return whether a name has one underscore in front, and is not Python's."""
    is_of_python = name.startswith("__") or name == "_" or name in OF_PYTHON
    return name.startswith("_") and not is_of_python


def list_defined(trees: list[ast.Module]) -> set[str]:
    """Return the private names that these modules define."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                found |= {node.attr} if is_own else set()
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if is_private(name)}


def list_used(tree: ast.Module, defined: set[str]) -> set[int]:
    """Return the numbers of the lines of a module that use a private name of another project."""
    lines = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
        if any(isinstance(n, str) and is_private(n) and n not in defined for n in names):
            lines.add(node.lineno)
    return lines


def main(arguments: list[str]) -> int:
    """Print what is above its limit, and return the exit status."""
    core = [ast.parse(path.read_text()) for path in (ROOT / "d2ldev").rglob("*.py")]
    status = 0
    for name, limit in LIMITS.items():
        package = ROOT / "backends" / f"d2ldev_{name}"
        paths = [
            path
            for path in sorted(package.rglob("*.py"))
            if not LEFT_OUT & {part.removesuffix(".py") for part in path.relative_to(package).parts}
        ]
        trees = {path: ast.parse(path.read_text()) for path in paths}
        everything = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
        defined = list_defined([*core, *everything])
        found = [(path, line) for path in paths for line in sorted(list_used(trees[path], defined))]
        if "--list" in arguments:
            for path, line in found:
                text = path.read_text().splitlines()[line - 1].strip()
                sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: {text}\n")
        if len(found) > limit:
            sys.stdout.write(f"d2ldev_{name}: {len(found)} lines with private names, not {limit}\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
