"""What every backend must do so that a run that was broken off goes on."""
