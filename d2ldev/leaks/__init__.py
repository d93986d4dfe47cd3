"""Find the lines of a library that leave the device of their inputs."""
