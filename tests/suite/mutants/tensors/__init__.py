"""Faults of the room of tensors, and of what stands on it."""
