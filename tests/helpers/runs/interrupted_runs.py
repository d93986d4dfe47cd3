"""A run that Ctrl-C ends as from a terminal, which sends it to every process of the group."""

import textwrap

from processes import run_python

DATA = '''
    """Examples that take a while to read, in a module that every process can import."""

    import time

    import numpy as np


    class Slow:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            # On a busy machine, too, the third batch of four comes after the interruption.
            time.sleep(0.1 if index < 8 else 0.5)
            return np.ones(3, "float32"), np.ones(1, "float32")
'''
RUN = """
    import os, signal, threading, time
    import d2ldev

    def press():
        os.killpg(0, signal.SIGINT)

    class Pressing:
        steps = 0

        def on_step_end(self, step, loss):
            self.steps += 1
            if self.steps == 2:
                in_step = {in_step}
                press() if in_step else threading.Timer(0.03, press).start()
                time.sleep(0.5 if in_step else 0.0)

    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pressing = Pressing()
    trainer = d2ldev.Trainer(3, backend={backend!r}, callbacks=pressing)
    history = trainer.fit(net, loader)
    show([history, pressing.steps, trainer.model is net])
"""


def interrupt_run(backend, made, folder, *, in_step):
    """Interrupt a run after its second step; its history, its steps, and whether it has the model.

    Args:
        backend: by name.
        made: lines that make ``net`` and ``loader``, which reads ``slow_data.Slow()``.
        folder: for the module ``slow_data``, and what processes leave behind.
        in_step: whether Ctrl-C comes in a step, or where a batch is waited for.
    """
    (folder / "slow_data.py").write_text(textwrap.dedent(DATA), encoding="utf-8")
    code = textwrap.dedent(made) + textwrap.dedent(RUN.format(backend=backend, in_step=in_step))
    # Processes that end so leave their sockets behind.
    (shown,) = run_python(code, hide=(), path=[folder], environment={"TMPDIR": str(folder)})
    return shown
