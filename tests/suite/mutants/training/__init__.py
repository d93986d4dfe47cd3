"""Faults of the module training, and of what stands on it."""
