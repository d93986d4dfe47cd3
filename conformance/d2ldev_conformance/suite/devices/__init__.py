"""What every backend must do in the room ``devices``."""
