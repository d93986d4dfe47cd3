"""The exercises of D2L's section 6.7.5, and what the section claims in words, measured.

``exercises`` measures, ``conclusions`` says what follows from the figures, and ``page`` shows them.
Nothing in the library imports this package but the command line.
"""
