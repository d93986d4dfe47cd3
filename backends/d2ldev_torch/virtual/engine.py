"""Backward passes on every virtual GPU, and errors in them.

torch's engine has a thread for each device that a backend's guard reports, and a guard in Python
reports one: a gradient on ``vgpu:1`` would find no thread. So a backward pass runs on the thread
that asked for it, which torch offers as an option of a thread.
https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.set_multithreading_enabled.html

The guard is asked for its type while C++ unwinds an exception, too, and Python calls nothing
while an exception of its own is pending: the process would end for an error in a hook. So the
guard takes the pending exception before it answers, and the engine raises it in the end.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import torch
from torch.autograd.variable import Variable

from d2ldev_torch.accelerator import find_accelerator

# As every call by ctypes into Python itself, it raises an exception that was pending.
_raise_pending = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = None
_raise_pending.argtypes = []


class _Taken(threading.local):
    """The exceptions that the guard took in backward passes of a thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.errors: list[BaseException] = []


_taken = _Taken()


class DeviceGuard(torch._C._acc.DeviceGuard):
    """What torch asks about the current device; all answers but this one are fixed."""

    def type_(self) -> Any:
        """The type of the device."""
        try:
            _raise_pending()
        except BaseException as error:
            if _taken.depth:
                _taken.errors.append(error)
            else:
                # Outside of a backward pass nobody is left to raise it.
                sys.excepthook(type(error), error, error.__traceback__)
        return torch._C._autograd.DeviceType.PrivateUse1


class CallingThreadEngine(torch._C._ImperativeEngine):
    """torch's engine, which leaves a backward pass on the thread that asked for it."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.autograd.backward``."""
        before = len(_taken.errors)
        _taken.depth += 1
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except SystemError:
            # An exception without an exception: the guard has it.
            if len(_taken.errors) == before:
                raise
            raise _taken.errors[before] from None
        finally:
            _taken.depth -= 1
            del _taken.errors[before:]


def start() -> None:
    """Have torch start its engine while it knows no virtual GPU, and so without their thread.

    No thread, no harm from a fork: else torch refuses every backward pass of a process that was
    forked after one, as it does where there are real GPUs, which have threads of their own.
    https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork
    """
    if not find_accelerator().count():
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.ones((), requires_grad=True))


def install() -> None:
    """Make it the engine of this process."""
    Variable._execution_engine = CallingThreadEngine()
