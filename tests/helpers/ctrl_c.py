"""Ctrl-C at a chosen point of the code of some modules."""

import contextlib
import sys


class Pressed:
    """Ctrl-C, once, at a point of a block's own code at which Python looks for signals.

    These are the beginning of a function of Python's and the end of one of C's.
    """

    def __init__(self, number, modules):
        self.number = number
        self.files = [module.__file__ for module in modules]

    def __call__(self, frame, event, _argument):
        code = frame.f_code
        # Not where a generator is closed, which is reported as a call.
        is_point = event in ("call", "c_return") and code.co_name != "<genexpr>"
        if is_point and code.co_filename in self.files:
            self.number -= 1
            if not self.number:
                sys.setprofile(None)
                raise KeyboardInterrupt


@contextlib.contextmanager
def press_ctrl_c(number, modules):
    """Press it in a block, at a point of these modules, and go on after the block."""
    before, press = sys.getprofile(), Pressed(number, modules)
    sys.setprofile(press)
    try:
        yield press
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
