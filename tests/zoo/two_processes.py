"""Train models in two processes: ``d2ldev launch --processes 2 two_processes.py FOLDER NAME...``.

PyTorch has a process for each GPU. One launch for all models takes the time of one start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import plain_torch
from checks import ProcessesError, Subject, describe, write_result

import d2ldev


def main(folder: Path, names: list[str]) -> None:
    """Train the models that have no result yet, until the first error."""
    models = [model for model in plain_torch.MODELS if model.id in names]
    for model in [model for model in models if not (folder / model.id).exists()]:
        subject = Subject(model, plain_torch, d2ldev.get_backend("torch"), folder)
        result: Any
        try:
            result = plain_torch.state_of(subject.fit())
        except Exception as error:  # it is an outcome
            result = ProcessesError(*describe(error))
        if os.environ["RANK"] == "0":
            write_result(folder, model, result)
        if isinstance(result, ProcessesError):
            return  # the other process takes it for an error of its peer


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
