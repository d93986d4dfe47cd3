"""The table of docs/api/errors.md: each program, and the line that fixes it; names of operands."""

import re
from collections import namedtuple
from functools import partial
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


IN_TWO_PARTS = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = backend.mlp([2, 2], device='gpu:0')
        self.second = backend.mlp([2, 2], device='gpu:1')
        self.host = backend.mlp([2, 2], device='cpu')
        self.weight = torch.nn.Parameter(b.clone())
    def forward(self, x):
        h = self.first(x)
        return {}
Net()(a)
"""


@pytest.fixture
def operands(virtual):
    """A tensor on each of two GPUs, also in containers that nobody can assign to."""
    a, b = virtual.ones((2, 2), device="gpu:0"), virtual.ones((2, 2), device="gpu:1")
    pair = namedtuple("Pair", "first second")(a, b)
    return {
        "backend": virtual,
        "torch": torch,
        "double": lambda x: x * 2,
        "a": a,
        "b": b,
        "pair": pair,
        "listed": [a, b],
        "host": virtual.mlp([2, 2]),
    }


@pytest.mark.parametrize(
    ("program", "found", "fix"),
    [
        (
            IN_TWO_PARTS.format("self.second(h)"),
            "self.second on gpu:1, h on gpu:0",
            "h = backend.to(h, 'gpu:1')",
        ),
        (
            IN_TWO_PARTS.format("self.host(h)"),
            "self.host on cpu, h on gpu:0",
            "backend.place(self.host, 'gpu:0') in the place of self.host",
        ),
        (
            IN_TWO_PARTS.format("h @ self.weight"),
            "h on gpu:0, self.weight on gpu:1",
            "self.weight.to(h.device) in the place of self.weight",
        ),
        ("host(a)", "host on cpu, a on gpu:0", "host = backend.place(host, 'gpu:0')"),
        ("a @ b.T", "a on gpu:0, b.T on gpu:1", "b.T.to(a.device) in the place of b.T"),
        (
            "pair.first + pair.second",
            "pair.first on gpu:0, pair.second on gpu:1",
            "pair.second.to(pair.first.device) in the place of pair.second",
        ),
        (
            "def add(x):\n    return x + b\nadd(a)",
            "x on gpu:0, b on gpu:1",
            "b.to(x.device) in the place of b",
        ),
    ],
)
def test_the_line_for_each_kind_of_expression_works(virtual, operands, program, found, fix):
    with d2ldev.use_backend(virtual):
        error, mended = run_and_mend(program, operands)
        assert error.problem.endswith(f"found {found}")
        assert error.fix == fix
        run(mended, operands)


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("torch.nn.functional.linear(a, double(b), double(a)[0])", "operand 3 on gpu:1"),
        ("torch.cat(listed)", "operand 1[1] on gpu:1"),
        ("torch.cat([*listed])", "operand 1[1] on gpu:1"),
        ("a @ a @ b.T", "operand 2 on gpu:1"),
        ("double(a).add(b)", "operand 2 on gpu:1"),
        ("listed[1] += a", "operand 1 on gpu:1"),
        (IN_TWO_PARTS.format("self.second(torch.relu(h))"), "operand 2 on gpu:0"),
    ],
)
def test_operands_that_the_line_does_not_show_have_numbers(virtual, operands, line, moved):
    with d2ldev.use_backend(virtual), pytest.raises(d2ldev.DeviceMismatchError) as caught:
        run(line, operands)
    found = caught.value.problem.partition(" found ")[2].split(", ")
    assert moved in found
    assert all(each.startswith("operand ") for each in found)
    assert ", where x is operand " in caught.value.fix


PROGRAMS = {
    "trainer.fit(net, data, optimizer=torch.optim.Adam, lr=0.1)": (
        "optimizer=torch.optim.Adam(net.parameters(), lr=0.1), or optimizer='adam'"
    ),
    "adam = partial(torch.optim.AdamW, lr=1e-3)\ntrainer.fit(net, data, optimizer=adam)": (
        "optimizer=adam(net.parameters())"
    ),
    "trainer.fit(net, data, optimizer=torch.optim.Optimizer)": (
        "optimizer=torch.optim.SGD(net.parameters(), lr=0.01), or another one of torch.optim"
    ),
    "trainer.fit(net, data, optimizer='Optimizer')": (
        "optimizer=torch.optim.SGD(net.parameters(), lr=0.01), or another one of torch.optim"
    ),
    "trainer.fit(net, data, loss=torch.nn.MSELoss(reduction='none'))": "reduction='mean'",
    "f = torch.nn.MSELoss(reduction='none')\ntrainer.fit(net, data, loss=f)": (
        "loss=lambda prediction, y: f(prediction, y).mean()"
    ),
    "f = torch.nn.MSELoss()\ntrainer.fit(net, data, f)": "trainer.fit(net, data, loss=f)",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_line_for_an_object_of_torch_makes_its_program_work(names, program):
    names["partial"] = partial
    error, mended = run_and_mend(program, names)
    assert error.fix == PROGRAMS[program]
    # The optimizer has its own learning rate, and the next error says to leave this one out.
    run(mended.replace("data, lr=0.1", "data"), names)


def test_a_loss_without_a_name_in_the_program_is_given_one_first(names):
    with pytest.raises(d2ldev.UnsupportedValueError) as error:
        run("trainer.fit(net, data, loss=lambda prediction, y: prediction - y)", names)
    call = "lambda prediction, y: loss_fn(prediction, y).mean()"
    assert error.value.fix == f"loss={call}, after loss_fn = ..."
