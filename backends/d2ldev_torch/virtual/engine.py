"""Backward passes on every virtual GPU.

torch's engine has a thread for each device that a backend's guard reports, and a guard in Python
reports one: a gradient on ``vgpu:1`` would find no thread. So a backward pass runs on the thread
that asked for it, which torch offers as an option of a thread.
https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.set_multithreading_enabled.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.variable import Variable


class CallingThreadEngine(torch._C._ImperativeEngine):
    """torch's engine, which leaves a backward pass on the thread that asked for it."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.autograd.backward``."""
        with torch.autograd.set_multithreading_enabled(False):
            return super().run_backward(*args, **kwargs)


def install() -> None:
    """Make it the engine of this process."""
    Variable._execution_engine = CallingThreadEngine()
