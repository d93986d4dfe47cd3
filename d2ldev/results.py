"""The classes of what calls return, for annotations and ``isinstance``.

>>> from d2ldev.results import Summary
>>> isinstance(backend.summarize([backend.ones(3)]), Summary)
True

Held by ``tests/core/package/test_public_types.py``.
"""

from d2ldev.contract.devices import Memory
from d2ldev.contract.group import Group
from d2ldev.contract.leaks import Leak
from d2ldev.contract.training import Learner
from d2ldev.files.load_into import Loaded
from d2ldev.history import History
from d2ldev.leaks.finding import Leaks
from d2ldev.operations.live_tensors import LiveTensor
from d2ldev.operations.summary import Summary
from d2ldev.operations.timing import Timing

__all__ = [
    "Group",
    "History",
    "Leak",
    "Leaks",
    "Learner",
    "LiveTensor",
    "Loaded",
    "Memory",
    "Summary",
    "Timing",
]
