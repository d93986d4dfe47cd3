"""Files: how tensors, layers and the states of optimizers are written and read."""

from __future__ import annotations

from d2ldev.framework import Files


class TinygradFiles(Files):
    """The files of tinygrad. The defaults work, with one copy more than necessary."""
