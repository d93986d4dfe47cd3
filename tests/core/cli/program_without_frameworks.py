"""``d2ldev`` where no framework is installed, whatever is installed here."""

import sys

if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(("torch", "jax", "tensorflow", "mxnet")))
    from d2ldev.cli import run_command

    run_command()
