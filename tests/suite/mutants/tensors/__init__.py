"""Faults of the module tensors, and of what stands on it."""
