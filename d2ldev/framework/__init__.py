"""What authors of backends import: the classes to implement, and the helpers of the core.

A backend is a distribution with a subclass of ``Framework``. An entry point of the group
``d2ldev.backends`` names the class. The class states the version of this interface that it was
written for: ``interface = 1``. d2ldev refuses a class with another version than ``INTERFACE``.

The names below are public, and so are the methods of their classes. Names that users have, such as
``Device`` and the errors, are in ``d2ldev``, and their types in ``d2ldev.typing``. A backend
imports nothing else of d2ldev. ``d2ldev.framework.testing`` has the types of the fixtures of the
conformance suite.

Held by ``tests/core/framework/test_author_names.py``, and by the contract "A backend imports the
public interface" of import-linter.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from d2ldev.contract import INTERFACE, Framework
from d2ldev.contract.devices import Devices, Memory
from d2ldev.contract.files import SPARSE, Files, Layer, Layout, same, turn, turn_after_flattening
from d2ldev.contract.framework import count_gpus
from d2ldev.contract.models import Models, NoTensor, Role, Slot
from d2ldev.contract.parallel import (
    BatchNorm,
    Parallel,
    deep_copy,
    gpu_of_process,
    twin_refusal,
)
from d2ldev.contract.strict import Strict
from d2ldev.contract.tensors import Tensor, Tensors
from d2ldev.contract.training import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    NO_LABEL,
    WEIGHT_DECAY,
    Learner,
    Portion,
    Sharded,
    Signature,
    Training,
    TrainingSettings,
    Weighted,
    bounds,
    optimizer_refusal,
    shard_refusal,
    state_refusal,
)
from d2ldev.dependencies import import_optional
from d2ldev.device import CPU, gpus_in_words
from d2ldev.errors import (
    NotBegunError,
    describe,
    quote,
    text_of,
    warn,
)
from d2ldev.nesting.containers import DICT, LIST, Container
from d2ldev.nesting.keras import make_keras_kind
from d2ldev.nesting.kinds import Kinds
from d2ldev.nesting.walk import (
    flatten,
    join_path,
    map_tensors,
    unwrap_broadcasts,
)
from d2ldev.operations import nvml
from d2ldev.operations.devices import (
    check_room,
    memory_of_the_machine,
    on,
    user_has_chosen,
    warn_too_late,
)
from d2ldev.operations.dlpack import ON_CPU, ON_CUDA, Description, description_of
from d2ldev.operations.inventory import Inventory, list_named_tensors, list_needed_tensors
from d2ldev.operations.keras import clone_keras_model
from d2ldev.operations.mixing import Operand, locate_tensors, mismatch, operands_of, replace
from d2ldev.operations.moving import is_text, to
from d2ldev.operations.placing import place
from d2ldev.scopes import Scopes
from d2ldev.typing import Inputs

if TYPE_CHECKING:
    from d2ldev.contract.group import Group
    from d2ldev.contract.leaks import Stray, Watch
    from d2ldev.operations.parallel import BatchShard, ShardSampler, shard_batch, shard_copy
    from d2ldev.training.functions import read_signature
    from d2ldev.training.keras_inputs import join_keras_inputs, read_keras_signature
    from d2ldev.training.objective import LEAST_WEIGHT, Objective
    from d2ldev.training.programs import Programs

__all__ = [
    "ADAGRAD_EPSILON",
    "ADAM_EPSILON",
    "BETAS",
    "CPU",
    "DICT",
    "INTERFACE",
    "LEAST_WEIGHT",
    "LIST",
    "MOMENTUM",
    "NO_LABEL",
    "ON_CPU",
    "ON_CUDA",
    "SPARSE",
    "WEIGHT_DECAY",
    "BatchNorm",
    "BatchShard",
    "Container",
    "Description",
    "Devices",
    "Files",
    "Framework",
    "Group",
    "Inputs",
    "Inventory",
    "Kinds",
    "Layer",
    "Layout",
    "Learner",
    "Memory",
    "Models",
    "NoTensor",
    "NotBegunError",
    "Objective",
    "Operand",
    "Parallel",
    "Portion",
    "Programs",
    "Role",
    "Scopes",
    "ShardSampler",
    "Sharded",
    "Signature",
    "Slot",
    "Stray",
    "Strict",
    "Tensor",
    "Tensors",
    "Training",
    "TrainingSettings",
    "Watch",
    "Weighted",
    "bounds",
    "check_room",
    "clone_keras_model",
    "count_gpus",
    "deep_copy",
    "describe",
    "description_of",
    "flatten",
    "gpu_of_process",
    "gpus_in_words",
    "import_optional",
    "is_text",
    "join_keras_inputs",
    "join_path",
    "list_named_tensors",
    "list_needed_tensors",
    "locate_tensors",
    "make_keras_kind",
    "map_tensors",
    "memory_of_the_machine",
    "mismatch",
    "nvml",
    "on",
    "operands_of",
    "optimizer_refusal",
    "place",
    "quote",
    "read_keras_signature",
    "read_signature",
    "replace",
    "same",
    "shard_batch",
    "shard_copy",
    "shard_refusal",
    "state_refusal",
    "text_of",
    "to",
    "turn",
    "turn_after_flattening",
    "twin_refusal",
    "unwrap_broadcasts",
    "user_has_chosen",
    "warn",
    "warn_too_late",
]

# The names that few programs need, and their modules: imported at their first use.
_RARE = {
    name: module
    for module, names in {
        # Only a launch needs it.
        "d2ldev.contract.group": ("Group",),
        # Only a search for leaks needs them.
        "d2ldev.contract.leaks": ("Stray", "Watch"),
        # Only training needs them.
        "d2ldev.operations.parallel": ("BatchShard", "ShardSampler", "shard_batch", "shard_copy"),
        "d2ldev.training.programs": ("Programs",),
        "d2ldev.training.keras_inputs": ("join_keras_inputs", "read_keras_signature"),
        "d2ldev.training.objective": ("BatchWeight", "LEAST_WEIGHT", "Objective"),
        "d2ldev.training.functions": ("read_signature",),
    }.items()
    for name in names
}


def __dir__() -> list[str]:
    """Return the public names, also before their import, for ``help`` and completion."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Return a name that is imported at its first use."""
    if name in _RARE:
        return getattr(import_module(_RARE[name]), name)
    raise AttributeError(f"module 'd2ldev.framework' has no attribute {name!r}")
