"""The reference backend: array-api-strict behind the d2ldev contract.

It needs no framework, so that it is what runs when none is installed, and the oracle that
the conformance suite is tried on. ``device1`` and ``device2`` are its virtual GPUs.
"""

requires = ("array_api_strict",)
