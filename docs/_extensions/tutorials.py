"""The tutorials of ``d2ldev tour`` on the site, with what each framework printed.

A page includes a notebook with MyST's ``include``. This extension runs the notebook in Jupyter,
once for each framework, and writes the outputs below the cells. A cell shows its code once. Outputs
that differ have a tab for each framework, and the site remembers the choice.

MyST-NB runs a page with one kernel and shows one output for a cell. Four tabs would need four
copies of each cell. A framework that is not installed has no tab, and Sphinx warns of it.

The outputs are kept in the folder of the doctrees. They are used again as long as the notebook,
d2ldev, the framework's package and the installed versions stay the same. A cell that fails ends the
build.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import os
import re
import tempfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging
from traitlets.config import Config

import d2ldev
from d2ldev.cli.tour import Cell, make_notebook, read_cells, tags_of

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
TIMEOUT = 300  # seconds for a cell
CORE = Path(d2ldev.__file__).parent

LOGGER = logging.getLogger(__name__)

Outputs = list[str]  # of each cell of code, as MyST


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to files that pages include."""
    app.connect("include-read", add_outputs)
    return {"parallel_read_safe": True}


def add_outputs(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Replace a notebook that a page includes by its text, its code and its outputs."""
    if content[0].startswith("---\njupytext:"):
        cells = read_cells(content[0])
        frameworks = [name for name in FRAMEWORKS if find_spec(name)]
        for name in FRAMEWORKS.keys() - frameworks:
            LOGGER.warning(f"{name} is not installed: the tutorials have no tab for it")
        outputs = asyncio.run(run_everywhere(cells, app.doctreedir / "outputs", frameworks))
        content[0] = write_page(cells, outputs)


async def run_everywhere(
    cells: list[Cell], folder: Path, frameworks: Sequence[str]
) -> dict[str, Outputs]:
    """Run a notebook on each framework; return the outputs by framework.

    As many kernels run at once as there are cores.

    Raises:
        ExtensionError: for a cell that fails, or that does not fail as its tags say.
    """
    limit = asyncio.Semaphore(os.cpu_count() or 1)

    async def run_once(framework: str) -> Outputs:
        file = folder / f"{key_of(cells, framework)}.json"
        if not file.exists():
            async with limit:
                outputs = await run(cells, framework)
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(outputs), encoding="utf-8")
        found: Outputs = json.loads(file.read_text(encoding="utf-8"))
        return found

    found = await asyncio.gather(*map(run_once, frameworks))
    return dict(zip(frameworks, found, strict=True))


def key_of(cells: list[Cell], framework: str) -> str:
    """Return a name for the outputs of a notebook on a framework, from all that they depend on."""
    key = hashlib.sha256(json.dumps([framework, cells]).encode())
    (entry,) = metadata.entry_points(group="d2ldev.backends", name=framework)
    package = find_spec(entry.module)
    if package is None or package.origin is None:
        raise ExtensionError(f"{entry.module} is not installed")
    for file in sorted([*CORE.rglob("*.py"), *Path(package.origin).parent.rglob("*.py")]):
        key.update(file.read_bytes())
    for distribution in sorted(f"{each.name} {each.version}" for each in metadata.distributions()):
        key.update(distribution.encode())
    return key.hexdigest()[:32]


async def run(cells: list[Cell], framework: str) -> Outputs:
    """Run a notebook on two virtual GPUs of a framework."""
    notebook = nbformat.from_dict(make_notebook(cells))
    with tempfile.TemporaryDirectory() as folder:
        variables = {name: each for name, each in os.environ.items() if "D2LDEV_" not in name} | {
            "D2LDEV_BACKEND": framework,
            "D2LDEV_VIRTUAL_GPUS": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "IPYTHONDIR": folder,
        }
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT,
            resources={"metadata": {"path": folder}},
            # Jupyter warns of TCP, which others on the machine may read.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),
        )
        try:
            await client.async_execute(env=variables)
        except CellExecutionError as error:
            text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
            raise ExtensionError(f"a cell of a tutorial fails on {framework}:\n{text}") from error
    return [write_output(cell, framework) for cell in notebook.cells if cell["cell_type"] == "code"]


def write_output(cell: Cell, framework: str) -> str:
    """Write the output of a cell that ran, as MyST."""
    has_failed = any(each["output_type"] == "error" for each in cell["outputs"])
    if "raises-exception" in tags_of(cell) and not has_failed:
        raise ExtensionError(f"on {framework} no error comes from this cell:\n{cell['source']}")
    texts, figures = [], []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            source = f"data:image/png;base64,{data['image/png'].strip()}"
            alternative = html.escape(data.get("text/plain", "figure"))
            figures.append(fence("{raw} html", f'<img src="{source}" alt="{alternative}">'))
        elif "text/html" in data and output["output_type"] == "display_data":
            # A value of the last line is text, as in a terminal.
            table = f'<div class="pst-scrollable-table-container">{data["text/html"]}</div>'
            figures.append(fence("{raw} html", table))
        elif "text/plain" in data:
            texts.append(data["text/plain"].rstrip() + "\n")
        elif output["output_type"] == "error":
            texts.append(f"{output['ename']}: {output['evalue']}\n")
        else:
            # TensorFlow logs each sum of gradients in Jupyter, and nowhere else.
            texts.append(re.sub(r"^INFO:\w+:.*\n?", "", output.get("text", ""), flags=re.MULTILINE))
    text = "".join(texts).rstrip()
    return "\n".join([fence("text", text)] * bool(text) + figures)


def write_page(cells: list[Cell], outputs: dict[str, Outputs]) -> str:
    """Write a page of a notebook, with a tab for each framework where outputs differ."""
    parts = []
    of_cells = iter(zip(*outputs.values(), strict=True))
    for cell in cells:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(fence("python", cell["source"]))
        found = next(of_cells, ("",))
        if len({*found}) > 1:
            parts.append(":::::{tab-set}\n:class: cell-outputs\n:sync-group: framework\n")
            for name, output in zip(outputs, found, strict=True):
                tab = f"::::{{tab-item}} {FRAMEWORKS[name]}\n:sync: {name}\n"
                parts.append(f"{tab}\n{output or '*no output*'}\n::::")
            parts.append(":::::")
        elif found[0]:
            parts.append(f"::::{{div}} cell-outputs\n{found[0]}\n::::")
    return "\n\n".join(parts) + "\n"


def fence(language: str, text: str) -> str:
    """Return a block of MyST that ends where the text ends."""
    longest = max((len(found) for found in re.findall("^ *(`+)", text, re.MULTILINE)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text}\n{marks}"
