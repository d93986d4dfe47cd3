"""The exercises of D2L's section 6.7.5, and measurements of the section's claims.

``d2ldev.cli.bench`` shows the figures. Nothing in the library imports this package but the command
line.
"""
