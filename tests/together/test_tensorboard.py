"""``TensorBoardLogger``: what TensorBoard itself reads; no framework is imported for it."""

import numpy as np
import pytest
from processes import run_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import d2ldev
from d2ldev import TensorBoardLogger, Trainer

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


def scalars(folder):
    """Return name -> step and value of each point, as TensorBoard shows them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def fit(folder, epochs, *others, **options):
    backend = d2ldev.get_backend("reference")
    trainer = Trainer(epochs, backend=backend, callbacks=[TensorBoardLogger(folder), *others])
    return trainer.fit(backend.mlp([2, 1], seed=0), [BATCH] * 2, [BATCH], lr=0.1, **options)


def expect(history):
    return {
        name: [(i, np.float32(value)) for i, value in enumerate(column)]
        for name, column in history.items()
    }


def test_tensorboard_reads_each_epoch_while_the_run_goes_on(tmp_path):
    folder, seen = tmp_path / "runs" / "first", []
    history = fit(folder, 3, lambda epoch, history: seen.append(len(scalars(folder)["loss"])))
    assert seen == [1, 2, 3]
    assert scalars(folder) == expect(history)


def test_a_run_that_goes_on_has_no_point_twice(tmp_path):
    path = tmp_path / "run"

    def fail(epoch, history):
        if epoch == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(tmp_path / "log", 4, fail, checkpoint=path)
    history = fit(tmp_path / "log", 4, checkpoint=path, resume=True)
    assert scalars(tmp_path / "log") == expect(history)


def test_no_framework_is_imported(tmp_path):
    code = f"""
        import sys
        from d2ldev import TensorBoardLogger
        logger = TensorBoardLogger({str(tmp_path)!r})
        logger.on_epoch_end(0, {{"loss": [1.0]}})
        show(sorted({{"tensorflow", "torch", "jax", "mxnet"}} & set(sys.modules)))
    """
    assert run_python(code) == [[]]
