"""Backends that are each broken in one way, and one that is sound but works asynchronously.

They are what the conformance suite is tried on: ``tests/test_mutants.py`` gives each of them to the
suite, and the requirement in its ``caught_by`` has to fail.
"""
