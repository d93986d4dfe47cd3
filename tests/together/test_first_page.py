"""The commands of docs/start.md that switch the framework print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, write_files

PAGE = ROOT / "docs" / "start.md"


def test_the_program_runs_on_each_framework_and_prints_the_losses_of_the_page(tmp_path):
    text = PAGE.read_text(encoding="utf-8").partition("## Switch the framework")[2]
    commands, shown = re.findall(r"```(?:bash|text)\n(.*?)```", text, re.DOTALL)
    write_files(PAGE, tmp_path)
    python = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TMPDIR": str(tmp_path),
    }
    printed = subprocess.check_output(
        ["bash", "-e"], input=commands, cwd=tmp_path, env=environment, text=True
    )
    assert re.sub(r"\[.*\]", "", printed) == re.sub(r"\[.*\]", "", shown)
    losses, expected = (re.findall(r"\d+\.\d+", each) for each in (printed, shown))
    assert list(map(float, losses)) == pytest.approx(list(map(float, expected)), rel=1e-3)
