"""What every backend must do in a step of training."""
