"""The same numbers on any number of devices: every model, optimizer and number against one device.

A module of a framework's tests has ``GRID``: the name of a model -> ``(make, batches)``. All of it
is trained in one process, or in each process of one launch, because frameworks take seconds to
begin. The batches are of 5, 5, 4 and 1 examples: no number of devices shares all of them evenly,
and the last one is smaller than any.
"""

import importlib.util
import itertools
import os
import pickle
import sys
from pathlib import Path

import numpy as np
from launched import run_processes
from several_gpus import flat_batches, trained

NUMBERS = (2, 3, 4)
"""Of GPUs in one process, or of processes."""

RATES = {"sgd": 0.1, "momentum": 0.1, "adam": 0.01}
CLIPS = (0, 0.05)
"""No clipping, and a norm that the gradients exceed."""

LIMIT = 1e-4
"""For float32: ``several_gpus.TOLERANCE`` as one number, for ``difference``."""

SIZES = (5, 5, 4, 1)


def flat(sizes=SIZES):
    """Return batches for a perceptron."""
    ((inputs, labels),) = flat_batches(sum(sizes), sum(sizes))
    stops = list(itertools.accumulate(sizes))
    return [(inputs[j - n : j], labels[j - n : j]) for n, j in zip(sizes, stops, strict=True)]


def cases(grid):
    """Return name -> ``(make, batches, options of trained)``."""
    return {
        f"{name}, {optimizer}, {'clipped' if clip else 'not clipped'}": (
            *model,
            {"optimizer": optimizer, "lr": RATES[optimizer], "gradient_clip_val": clip},
        )
        for (name, model), optimizer, clip in itertools.product(grid.items(), RATES, CLIPS)
    }


def difference(found, expected):
    """Return the largest difference of values and histories, relative to ``|expected| + 0.1``."""
    (values, history), (others, curves) = found, expected
    assert list(history) == list(curves)
    pairs = [*zip(values, others, strict=True)]
    pairs += zip(history.values(), curves.values(), strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)) / (np.abs(b) + 0.1))) for a, b in pairs)


def main(grid):
    """Train the whole grid in this process, and keep what it has learned in a file."""
    import d2ldev

    name, folder, *numbers = sys.argv[1:]
    backend, found = d2ldev.get_backend(name), {}
    for case, (make, batches, options) in cases(grid).items():
        for number in map(int, numbers):
            values, history = trained(
                *(backend, make, batches, number),
                loss="cross_entropy",
                metrics=["accuracy"],
                **options,
            )
            found[case, number] = list(values.values()), history
    Path(folder, os.environ["RANK"]).write_bytes(pickle.dumps(found))


def _learned(name, module, folder, processes, *num_gpus, begin):
    """Return what each process has learned: ``(case, number of GPUs)`` -> values and history."""
    folder.mkdir()
    program = f"{begin}\nimport {module}, same_numbers\nsame_numbers.main({module}.GRID)"
    done = run_processes(
        *(program, name, folder, *num_gpus),
        number=processes,
        timeout=60,
        limit=3600,  # each fit of PyTorch on several GPUs starts its processes
        path=[Path(__file__).parent, Path(importlib.util.find_spec(module).origin).parent],
        environment={
            "D2LDEV_VIRTUAL_GPUS": str(max(num_gpus)),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    assert [each.returncode for each in done] == [0] * processes, done[-1].stderr
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(processes)]


def differences_of_gpus(name, module, folder, begin=""):
    """Train on one to four virtual GPUs of one process; by how much that differs from one.

    Args:
        name: of the backend.
        module: the name of one beside the test that has ``GRID``.
        folder: for what is learned; is made.
        begin: what the program begins with.

    Returns:
        ``(case, number of GPUs)`` -> ``difference``.
    """
    (found,) = _learned(name, module, folder, 1, 1, *NUMBERS, begin=begin)
    return {
        (case, number): difference(learned, found[case, 1])
        for (case, number), learned in found.items()
        if number > 1
    }


def differences_of_processes(name, module, folder, begin=""):
    """Train in two, three and four processes; see ``differences_of_gpus``.

    Each has a virtual GPU. All have to end with the same, of which rank 0's is compared.
    """
    folder.mkdir()
    (alone,) = _learned(name, module, folder / "1", 1, 1, begin=begin)
    found = {}
    for number in NUMBERS:
        first, *others = _learned(name, module, folder / str(number), number, 1, begin=begin)
        for key, learned in first.items():
            assert all(difference(other[key], learned) == 0 for other in others), key
            found[key[0], number] = difference(learned, alone[key])
    return found


def assert_same_numbers(found, record_property):
    """Check differences, and note and print the largest one of each optimizer and number."""
    for optimizer, number in itertools.product(RATES, NUMBERS):
        of_both = {
            case: value for (case, n), value in found.items() if n == number and optimizer in case
        }
        largest = max(of_both, key=of_both.get)
        record_property(f"{optimizer} on {number}", of_both[largest])
        print(f"{optimizer} on {number}: {of_both[largest]:.1e} ({largest})")
    assert max(found.values()) < LIMIT, {key: x for key, x in found.items() if x >= LIMIT}
