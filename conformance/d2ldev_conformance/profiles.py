"""The profiles of the suite: which tests a run has, and on how many virtual GPUs it has them.

``d2ldev conformance NAME --profile quick`` runs the suite in a process for each number of virtual
GPUs of the profile. ``pytest --d2ldev-profile quick`` selects the tests that the profile has for
the virtual GPUs of its own process. A run without a profile has all tests but the nightly ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Traits(NamedTuple):
    """The traits of a test that a profile selects it by.

    Args:
        module: the module of the contract that it tests.
        requirement: the id of its requirement.
        gpus: the number of GPUs that it needs.
        names_gpu: whether it needs a GPU, or has "gpu" in its name.
        is_repeated: whether it is there for a later GPU, too.
        starts_processes: whether it starts processes.
    """

    module: str
    requirement: str
    gpus: int
    names_gpu: bool
    is_repeated: bool = False
    starts_processes: bool = False


@dataclass(frozen=True)
class Profile:
    """A selection of the suite.

    Args:
        virtual_gpus: how many virtual GPUs each process has. 0 is the CPU alone, and None is the
            machine as it is. Without a real GPU, a profile with both leaves out None.
        selects: whether a process with so many virtual GPUs runs a test.
        is_nightly: whether a process with GPUs, virtual ones included, runs the nightly tests.
    """

    virtual_gpus: tuple[int | None, ...]
    selects: Callable[[Traits, int], bool]
    is_nightly: bool = False

    def processes(self, most: int) -> list[int | None]:
        """Return how many virtual GPUs each process has, for a backend that makes ``most``.

        >>> PROFILES["default"].processes(2)
        [None, 2]
        """
        numbers = [each and (min(each, most) or None) for each in self.virtual_gpus]
        return list(dict.fromkeys(numbers))


# A process ends in the same way on the CPU and on a virtual GPU. It counts examples, labels and
# steps in the same way. Each of these requirements starts processes, which takes long.
_SAME_ON_VIRTUAL_GPUS = (
    "fit.resumes-when-killed",
    "processes.accumulate",
    "processes.accumulate-by-weight",
    "processes.begin-with-the-first",
    "processes.end-with-a-lost-one",
    "processes.end-with-the-same",
    "processes.leave-out-labels",
    "processes.leave-what-was-learned",
    "processes.refuse-other-batches",
    "processes.shuffle-as-the-first",
    "processes.stop-together",
    "processes.take-small-batches",
    "processes.weigh-the-whole-batch",
)


def _is_quick(test: Traits, virtual_gpus: int) -> bool:
    # The start of a process takes as long as a hundred tests.
    if test.starts_processes:
        return False
    # What fails on the CPU or on the first GPU mostly fails on the last one, too. Real GPUs are
    # not like the CPU.
    return not (virtual_gpus and test.is_repeated)


def _select_everything(test: Traits, virtual_gpus: int) -> bool:
    # Some tests compare with the reference backend, which makes no more than two.
    return virtual_gpus <= 2 or test.gpus > 2


def _differs(test: Traits, virtual_gpus: int) -> bool:
    if virtual_gpus == 0 or virtual_gpus > 2:
        return _select_everything(test, virtual_gpus)
    if test.requirement in _SAME_ON_VIRTUAL_GPUS:
        return False
    # A step of training takes long, and the kernels of a virtual GPU are the CPU's.
    return test.module != "training" or test.names_gpu


PROFILES = {
    # Amid a change: each requirement of one process, in a minute on the reference and on PyTorch.
    "quick": Profile((2,), _is_quick),
    # For each change: the whole suite on this machine, and then the tests that virtual GPUs change.
    "default": Profile((None, 2, 4), _differs),
    # For reports: the whole suite on the CPU alone, on two virtual GPUs, and on real ones.
    "everywhere": Profile((0, 2, None), _select_everything),
    # For each night: also the tests that take minutes. Some need four GPUs.
    "nightly": Profile((None, 2, 4), _select_everything, is_nightly=True),
}
