"""The table of docs/api/errors.md: each program, and the line that fixes it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from d2ldev_conformance.suite.fixes import run, run_and_mend

import d2ldev
from d2ldev import ArrayLoader, EarlyStopping, Trainer

PAGE = Path(__file__).parents[3] / "docs" / "api" / "errors.md"
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture
def names(virtual):
    backend = virtual
    x = np.random.default_rng(0).random((8, 4), "float32")
    y = x.sum(1, keepdims=True)
    labels = (y[:, 0] > 2).astype("int64")
    net, kernel = backend.mlp([4, 1]), backend.ones((4, 4), device="gpu:1")
    objects = {"backend": backend, "net": net, "trainer": Trainer(1, backend=backend)}
    classes = {"ArrayLoader": ArrayLoader, "EarlyStopping": EarlyStopping, "Trainer": Trainer}
    return {
        **objects,
        **classes,
        "X": x,
        "y": y,
        "labels": labels,
        "classifier": backend.mlp([4, 2]),
        "torch": torch,
        "data": ArrayLoader(x, y, batch_size=4),
        "classes": ArrayLoader(x, labels, batch_size=4),
        "learner": backend.learner(net),
        "box": {"kernel": kernel},
        "kernel": kernel,
        "inputs": backend.asarray(x),
        "targets": backend.asarray(y),
        "images": backend.ones((4, 4), device="gpu:0"),
        "on_gpu_1": backend.mlp([4, 1], device="gpu:1"),
    }


def test_the_table_has_rows():
    assert len(ROWS) > 10


@pytest.mark.parametrize(("program", "fix"), ROWS)
def test_the_line_of_the_table_makes_its_program_work(virtual, names, program, fix):
    with d2ldev.use_backend(virtual):
        error, mended = run_and_mend(program, names)
        assert error.fix == fix
        run(mended, names)
