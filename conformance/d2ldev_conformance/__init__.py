"""The conformance suite of d2ldev: what every backend must do, as tests that name no backend.

Run it with ``d2ldev conformance NAME``, or
``pytest --pyargs d2ldev_conformance --d2ldev-backend NAME``.
"""
