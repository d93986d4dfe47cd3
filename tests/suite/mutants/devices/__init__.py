"""Faults of the room of devices, and of what stands on it."""
