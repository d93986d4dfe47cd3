"""The line after ``fix:`` makes a program work: it is applied, and the program runs again.

A fix that does not work is worse than none: the reader looks for the mistake elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import ArrayLoader, EarlyStopping, Trainer, UnsupportedValueError
from d2ldev_conformance.provision import own_optimizers
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.fixes import run, run_and_mend

SECTION = "6.7.3"
SOURCE = "contract, Containers and errors"

PROGRAMS = {
    "labels without a loss": "trainer.fit(classifier, ArrayLoader(X, labels, batch_size=4))",
    "labels of one axis too few": (
        "y = y[:, 0]\ntrainer.fit(net, ArrayLoader(X, y, batch_size=4))"
    ),
    "labels that are one-hot": (
        "y = np.eye(2, dtype='float32')[labels]\n"
        "trainer.fit(classifier, ArrayLoader(X, y, batch_size=4), loss='cross_entropy')"
    ),
    "labels of one axis too many": (
        "y = labels[:, None]\n"
        "trainer.fit(classifier, ArrayLoader(X, y, batch_size=4), loss='cross_entropy')"
    ),
    "labels that are floats": (
        "y = labels.astype('float32')\n"
        "trainer.fit(classifier, ArrayLoader(X, y, batch_size=4), loss='cross_entropy')"
    ),
    "a misspelt optimizer": "trainer.fit(net, data, optimizer='adamm')",
    "a misspelt loss": "trainer.fit(net, data, loss='MES')",
    "a misspelt precision": "Trainer(1, backend=backend, matmul_precision='hihg')",
    "a misspelt activation": "backend.mlp([4, 2], activation='rleu')",
    "a misspelt dtype": "backend.zeros(2, dtype='flaot32')",
    "a dtype that is too small": "backend.full(2, 0.25, dtype='int32')",
    "a misspelt device": "backend.zeros(2, device='gpu0:x')",
    "too many GPUs": "Trainer(1, num_gpus=64, backend=backend)",
    "arrays to train on": "trainer.fit(net, X, y)",
    "an array to train on": "trainer.fit(net, X)",
    "an array to evaluate on": "trainer.validate(net, X)",
    "an array to predict": "trainer.predict(net, X)",
    "the data before the model": "trainer.fit(data, net)",
    "the loss in the place of the data to evaluate on": "trainer.fit(net, data, 'mse')",
    "a tensor to step with": "learner.step(inputs, targets)",
    "a tensor to evaluate": "learner.evaluate(inputs, targets)",
    "a tensor to predict with": "learner.predict(inputs)",
    "a loss in the place of the data to evaluate on": (
        "def f(prediction, y):\n    d = prediction[0, 0] - y[0, 0]\n    return d * d\n"
        "trainer.fit(net, data, f)"
    ),
    "the class of a callback": (
        "Trainer(1, backend=backend, callbacks=EarlyStopping).fit(net, data, data)"
    ),
}


@pytest.fixture
def names(backend):
    """The names that each program begins with."""
    x = np.random.default_rng(0).random((8, 4), "float32")
    y = x.sum(1, keepdims=True)
    net = backend.mlp([4, 1])
    return {
        "backend": backend,
        "np": np,
        "net": net,
        "classifier": backend.mlp([4, 2]),
        "ArrayLoader": ArrayLoader,
        "EarlyStopping": EarlyStopping,
        "Trainer": Trainer,
        "X": x,
        "y": y,
        "labels": (y[:, 0] > 2).astype("int64"),
        "data": ArrayLoader(x, y, batch_size=4),
        "trainer": Trainer(1, backend=backend),
        "inputs": backend.asarray(x),
        "targets": backend.asarray(y),
        "learner": backend.learner(net),
    }


@requirement("errors.fix-works", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_that_fixes_a_program_makes_it_work(names, name):
    """Name a line that makes the program work, in the words of the program."""
    _, mended = run_and_mend(PROGRAMS[name], names)
    run(mended, names)


@requirement("errors.fix-has-own-words", section=SECTION, source=SOURCE)
def test_an_optimizer_without_a_name_here_is_the_frameworks_own(names, own_optimizer):
    """Answer the name of an optimizer that d2ldev does not have with the framework's own one.

    The name of another optimizer has another meaning.
    """
    assert own_optimizer
    error, mended = run_and_mend("trainer.fit(net, data, optimizer='rmsprop')", names)
    assert not error.fix.startswith("optimizer='")
    run(mended, names)


@requirement("errors.fix-makes-objects", section=SECTION, source=SOURCE)
def test_the_class_of_a_loss_is_refused_with_the_line_that_makes_an_object(names, own_optimizer):
    """Refuse the class of a loss, and name the line that makes an object of it.

    A class can be called like a loss, and returns an object of it.
    """
    assert own_optimizer
    program = """
class Error:
    def __call__(self, prediction, y):
        error = prediction[0, 0] - y[0, 0]
        return error * error
trainer.fit(net, data, loss=Error)
"""
    error, mended = run_and_mend(program, names)
    assert error.fix == "loss=Error()"
    run(mended, names)


@requirement("errors.fix-has-own-words", section=SECTION, source=SOURCE)
@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("loss", "mae", ("mse", "cross_entropy", "bce")),
        ("loss", "MSELoss", ("mse", "cross_entropy", "bce")),
        ("precision", "bfloat16", ("bf16", "fp16")),
        ("precision", "half", ("bf16", "fp16")),
    ],
)
def test_a_name_without_a_meaning_is_answered_with_all_names(names, option, value, choices):
    """Answer another word for a loss or a precision with the names that there are.

    One of them alone has another meaning.
    """
    call = f"backend.learner(net, {option}={value!r})"
    with pytest.raises(UnsupportedValueError) as error:
        run(call, names)
    assert all(f"{option}={choice!r}" in error.value.fix for choice in choices)


@requirement("errors.fix-has-own-words", section=SECTION, source=SOURCE)
def test_labels_of_other_axes_are_no_labels_that_are_one_hot(names):
    """Name the shapes of logits and labels that do not fit, without ``argmax`` of class numbers."""
    backend = names["backend"]
    learner = backend.learner(names["classifier"], loss="cross_entropy")
    labels = backend.asarray(np.zeros((8, 3), "int32"))
    with pytest.raises(UnsupportedValueError) as error:
        learner.step((names["inputs"],), labels)
    assert error.value.fix.startswith("logits of shape (8, 3, classes)")


@requirement("errors.fix-works", section=SECTION, source=SOURCE)
def test_the_learning_rate_of_an_optimizers_own_is_left_out(names, own_optimizer):
    """Answer a learning rate beside an optimizer, which has its own, by leaving it out."""
    net = names["net"]
    optimizer = own_optimizers(names["backend"])[own_optimizer](net)
    with pytest.raises(UnsupportedValueError) as error:
        names["trainer"].fit(net, names["data"], optimizer=optimizer, lr=0.1)
    assert error.value.fix == "leave lr out"


@requirement("errors.fix-has-own-words", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("option", ["best", "checkpoint"])
def test_a_truth_value_as_a_file_of_fit_is_answered_with_that_option(names, option):
    """Answer a truth value as a file of ``fit`` with a line for ``fit``."""
    with pytest.raises(UnsupportedValueError) as error:
        run(f"trainer.fit(net, data, {option}=True)", names)
    assert error.value.fix.startswith(f"{option}='")
