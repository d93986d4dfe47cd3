"""The classes of the reference backend: the one door through which tests and mutants enter it.

Mutants derive from them, and tests of the core make backends with other devices.
"""

from d2ldev_reference import ReferenceFramework, provision
from d2ldev_reference.devices import NATIVE, ReferenceDevices
from d2ldev_reference.files import ReferenceFiles
from d2ldev_reference.models import MLP, ReferenceModels
from d2ldev_reference.parallel import ReferenceParallel
from d2ldev_reference.strict import ReferenceStrict
from d2ldev_reference.tensors import ReferenceTensors
from d2ldev_reference.training import ReferenceTraining
from d2ldev_reference.training.learner import ReferenceLearner
from d2ldev_reference.training.replicated import ReferenceGroupLearner, ReferenceParallelLearner

__all__ = [
    "MLP",
    "NATIVE",
    "ReferenceDevices",
    "ReferenceFiles",
    "ReferenceFramework",
    "ReferenceGroupLearner",
    "ReferenceLearner",
    "ReferenceModels",
    "ReferenceParallel",
    "ReferenceParallelLearner",
    "ReferenceStrict",
    "ReferenceTensors",
    "ReferenceTraining",
    "provision",
]
