"""A port for processes that a test starts."""

import random
import socket


def free_port():
    """Return the number of a port on which nothing listens.

    The system gives its own choice to another program, if that asks while a framework is imported.
    This port is below those that it chooses.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
