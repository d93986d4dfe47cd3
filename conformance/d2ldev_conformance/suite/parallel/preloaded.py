"""What takes long in a new process: it imports the framework, as far as training needs it.

``conftest.py`` lets one process import this module. Those that ``fit`` starts are its copies.
"""

import d2ldev
from d2ldev import settings

# Whoever imports all modules of the suite has chosen no backend.
if settings.backend_name():
    backend = d2ldev.get_backend(settings.backend_name())
    # No step is made: what frameworks compute with, such as threads, is not for a copy.
    backend.learner(backend.mlp([1, 1]), loss="mse")
