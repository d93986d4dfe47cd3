"""The conformance suite of d2ldev: what every backend must do, as tests that name no backend.

Run it with ``d2ldev conformance NAME``, or
``pytest --pyargs d2ldev_conformance --d2ldev-backend NAME``.
"""

from importlib.util import find_spec
from pathlib import Path

# In a checkout beside an installed wheel, pytest imports its plugins first, and finds the wheel's.
# The modules have to be the checkout's, as d2ldev is.
_d2ldev = find_spec("d2ldev")
if _d2ldev is not None and _d2ldev.origin is not None:
    _checkout = Path(_d2ldev.origin).parents[1] / "conformance" / "d2ldev_conformance"
    if _checkout.is_dir():
        __path__[:] = [str(_checkout)]
