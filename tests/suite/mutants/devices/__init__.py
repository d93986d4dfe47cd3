"""Faults of the module devices, and of what stands on it."""
