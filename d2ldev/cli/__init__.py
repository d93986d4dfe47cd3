"""The command line: ``d2ldev doctor``, ``tour``, ``bench``, ``launch`` and ``conformance``.

Nothing in the library imports this package, so that ``import d2ldev`` needs neither typer nor
rich.
"""
