"""What a user asks for, as functions that every framework shares."""
