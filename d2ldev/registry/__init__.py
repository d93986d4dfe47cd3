"""Which backends there are, and which one is active."""
