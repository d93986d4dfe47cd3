"""The command line: ``d2ldev doctor``, ``d2ldev tour`` and ``d2ldev conformance``.

Nothing in the library imports this package, so that ``import d2ldev`` needs neither typer nor
rich.
"""
