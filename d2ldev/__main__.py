"""``python -m d2ldev``: the command line."""

from d2ldev.cli import run_command

run_command()
