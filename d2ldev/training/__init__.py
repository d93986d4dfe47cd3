"""The ``Trainer``, its data, its callbacks and its checkpoints.

Source: D2L, sections 3.2 ("Object-Oriented Design for Implementation") and 6.7.3.
"""
