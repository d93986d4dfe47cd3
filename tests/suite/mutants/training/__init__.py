"""Faults of the room of training, and of what stands on it."""
