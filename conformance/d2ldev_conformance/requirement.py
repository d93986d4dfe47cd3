"""``@requirement``: the id under which a test is reported, the chapter's section, and the source.

>>> @requirement("copy.noop-returns-same-object", section="6.7.2.2", source="D2L")
... def test_a_tensor_already_on_the_device_is_returned_itself(backend): ...
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

SUITE = Path(__file__).parent / "suite"
"""The folder of the tests."""
_ID = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")

SECTIONS = {
    "6.6": "File I/O",
    "6.7.1": "Computing Devices",
    "6.7.2": "Tensors and GPUs",
    "6.7.2.1": "Storage on the GPU",
    "6.7.2.2": "Copying",
    "6.7.2.3": "Side Notes",
    "6.7.3": "Neural Networks and GPUs",
    "6.7.5": "Exercises",
    "13.5": "Training on Multiple GPUs",
    "13.6": "Concise Implementation for Multiple GPUs",
}

_D2L = "https://d2l.ai/chapter_"
_USE_GPU = f"{_D2L}builders-guide/use-gpu.html"
_SECTION_LINKS = {
    "6.6": f"{_D2L}builders-guide/read-write.html",
    "6.7.1": f"{_USE_GPU}#computing-devices",
    "6.7.2": f"{_USE_GPU}#tensors-and-gpus",
    "6.7.2.1": f"{_USE_GPU}#storage-on-the-gpu",
    "6.7.2.2": f"{_USE_GPU}#copying",
    "6.7.2.3": f"{_USE_GPU}#side-notes",
    "6.7.3": f"{_USE_GPU}#neural-networks-and-gpus",
    "6.7.5": f"{_USE_GPU}#exercises",
    "13.5": f"{_D2L}computational-performance/multiple-gpus.html",
    "13.6": f"{_D2L}computational-performance/multiple-gpus-concise.html",
}

_ARRAY_API = "https://data-apis.org/array-api/latest/"
_TORCH = "https://docs.pytorch.org/docs/stable/"
SOURCES = {
    "contract": "api/backend.md#all-methods",
    "contract, Dtypes of new tensors": "contract.md#dtypes-of-new-tensors",
    "contract, Random numbers": "explanation/equal-numbers.md#random-numbers",
    "contract, How precise are products?": (
        "explanation/equal-numbers.md#how-precise-are-products"
    ),
    "contract, What fills the GPU?": "guides/gpu-memory.md",
    "contract, Containers and errors": "contract.md#containers-and-errors",
    "contract, What place does not move": "explanation/what-place-does-not-move.md",
    "contract, Which backend": "contract.md#which-backend",
    "contract, Blocks": "contract.md#blocks-of-generators-tasks-and-threads",
    "contract, The book's own code": "contract.md#the-books-own-code",
    "contract, Files": "files.md#what-fits",
    "contract, Mixing devices": "contract.md#mixing-devices",
    "contract, Leaks": "leaks.md",
    "contract, Several GPUs": "guides/several-gpus.md",
    "contract, What of a batch is split": "guides/split-batches.md#what-of-a-batch-is-split",
    "contract, Several processes": "guides/several-machines.md",
    "contract, Training": "training.md",
    "contract, Labels": "training.md#labels",
    "contract, Metrics": "guides/metrics.md",
    "contract, Logs": "training.md#logs-and-random-numbers",
    "contract, Callbacks": "training.md#callbacks-and-schedules",
    "contract, Resuming a run": "resuming.md",
    "contract, Virtual GPUs": "virtual-gpus.md",
    "contract, Lazy frameworks": "kinds-of-frameworks.md#lazy-frameworks",
    "D2L": "",  # the section of the requirement
    "D2L 3.2": f"{_D2L}linear-regression/oo-design.html",
    "D2L 5.6": f"{_D2L}multilayer-perceptrons/dropout.html",
    "array API, creation functions": f"{_ARRAY_API}API_specification/creation_functions.html",
    "array API, asarray": (
        f"{_ARRAY_API}API_specification/generated/array_api.asarray.html#array_api.asarray"
    ),
    "array API, data types": f"{_ARRAY_API}API_specification/data_types.html",
    "array API, device support": f"{_ARRAY_API}design_topics/device_support.html",
    "DLPack": "https://dmlc.github.io/dlpack/latest/python_spec.html",
    "NumPy, arrays": "https://numpy.org/doc/stable/reference/arrays.ndarray.html",
    "NumPy, arange": "https://numpy.org/doc/stable/reference/generated/numpy.arange.html",
    "NumPy, random sampling": "https://numpy.org/doc/stable/reference/random/index.html",
    "PyTorch, automatic mixed precision": f"{_TORCH}amp.html",
    "PyTorch, BCEWithLogitsLoss": f"{_TORCH}generated/torch.nn.BCEWithLogitsLoss.html",
    "PyTorch, clip_grad_norm_": f"{_TORCH}generated/torch.nn.utils.clip_grad_norm_.html",
    "PyTorch, CrossEntropyLoss": f"{_TORCH}generated/torch.nn.CrossEntropyLoss.html",
    "PyTorch, CUDA semantics": f"{_TORCH}notes/cuda.html",
    "PyTorch, loss functions": f"{_TORCH}nn.html#loss-functions",
    "PyTorch, multiprocessing": f"{_TORCH}notes/multiprocessing.html",
    "PyTorch, optimizers": f"{_TORCH}optim.html#algorithms",
    "PyTorch, torchrun": f"{_TORCH}elastic/run.html",
    "JAX, asynchronous dispatch": "https://docs.jax.dev/en/latest/async_dispatch.html",
    "JAX, pytrees": "https://docs.jax.dev/en/latest/pytrees.html",
    "Keras, EarlyStopping": "https://keras.io/api/callbacks/early_stopping/",
    "Lightning, precision": "https://lightning.ai/docs/fabric/stable/fundamentals/precision.html",
    "safetensors, format": "https://github.com/huggingface/safetensors#format",
    "Python, pickle": "https://docs.python.org/3/library/pickle.html",
    "PEP 567": "https://peps.python.org/pep-0567/",
}
"""Each source that a requirement may name -> its address, which may be a page of ``docs``."""


class Requirement(NamedTuple):
    """One thing that every backend must do.

    Args:
        id: ``area.what-holds``; a report has one row for it.
        section: the section of D2L's chapter that it comes from.
        module: of the contract, one of ``MODULES``; see ``module_of``.
    """

    id: str
    section: str
    module: str = ""


def requirement(
    id: str,  # noqa: A002
    *,
    section: str,
    source: str | None = None,
) -> pytest.MarkDecorator:
    """Mark a test as the one that checks a requirement.

    Args:
        id: ``area.what-holds``.
        section: the section of D2L's chapter to which it belongs.
        source: one of ``SOURCES``, which states it; None for the ``SOURCE`` of the test's file.

    Raises:
        ValueError: if the id is not ``area.what-holds``, or there is no such section or source.
    """
    if not _ID.fullmatch(id) or section not in SECTIONS:
        raise ValueError(f"no id of a requirement, or no section: {id!r}, {section!r}")
    if source is not None and source not in SOURCES:
        raise ValueError(f"no source of requirements: {source!r}; there are {', '.join(SOURCES)}")
    return pytest.mark.requirement(id, section, source=source)


def link_source(source: str, section: str) -> tuple[str, str]:
    """Return the full name of a source and its address.

    Args:
        source: one of ``SOURCES``.
        section: the section of D2L's chapter to which the requirement belongs.

    >>> link_source("D2L", "6.7.1")
    ('D2L 6.7.1', 'https://d2l.ai/chapter_builders-guide/use-gpu.html#computing-devices')
    """
    if source == "D2L":
        return f"D2L {section}", _SECTION_LINKS[section]
    return source, SOURCES.get(source, "")


def requirement_of(item: pytest.Item) -> Requirement | None:
    """Return the requirement that a collected test checks; None if it names none."""
    mark = item.get_closest_marker("requirement")
    if mark is None:
        return None
    return Requirement(*mark.args)._replace(module=module_of(item.path))


def module_of(path: Path) -> str:
    """Return the module of a file of tests, at any depth in the suite; its folder outside of it."""
    if path.is_relative_to(SUITE):
        return path.relative_to(SUITE).parts[0]
    return path.parent.name
