"""The tables for those who come from PyTorch, or from a library on top of it."""

from importlib.util import find_spec

import pytest
import torch
from coming_from import find_unknown, look_up_their_names, read_rows, run_our_lines

SECTIONS = (
    "Device code of PyTorch",
    "Hugging Face accelerate",
    "Lightning Fabric",
    "The d2l package",
)


def test_our_lines_run(tmp_path):
    run_our_lines("torch", *SECTIONS, folder=tmp_path)


def test_the_lines_of_pytorch_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ones = torch.ones(2, 2)
    names = {"torch": torch, "device": torch.device("cpu"), "rows": [[1.0]], "x": ones}
    names |= {"batch": {"x": ones}, "net": torch.nn.Linear(2, 2)}
    on_gpus = 0
    for code, _ in read_rows("Device code of PyTorch"):
        if code.startswith("torch.cuda."):
            on_gpus += 1
            assert find_unknown(code, {"torch": torch}) == []
        else:
            exec(code, dict(names))
    assert on_gpus == 4


def test_an_unknown_name_is_found():
    assert find_unknown("torch.cuda.wait_for_all()", {"torch": torch}) == [
        "torch.cuda.wait_for_all"
    ]
    assert find_unknown("torch.manual_seed(number=0)", {"torch": torch}) == ["number"]


@pytest.mark.parametrize(
    ("section", "imports", "required"),
    [
        (
            "Hugging Face accelerate",
            "from accelerate import Accelerator; accelerator = Accelerator; "
            "from accelerate.utils import send_to_device",
            "accelerate",
        ),
        (
            "Lightning Fabric",
            "from lightning_fabric import Fabric; fabric = Fabric",
            "lightning_fabric",
        ),
        ("The d2l package", "import torchvision; from d2l import torch as d2l", "d2l torchvision"),
        ("Ivy", "import ivy", "ivy"),
    ],
)
def test_the_names_of_a_library_are_its_own(section, imports, required, tmp_path):
    missing = [name for name in required.split() if find_spec(name) is None]
    if missing:
        pytest.skip(f"not among the test dependencies: {', '.join(missing)}")
    look_up_their_names(section, imports, tmp_path)
