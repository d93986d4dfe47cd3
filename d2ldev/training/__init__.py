"""Training on a device, built on the interface alone.

Source: D2L, sections 3.2 ("Object-Oriented Design for Implementation") and 6.7.3.
"""
