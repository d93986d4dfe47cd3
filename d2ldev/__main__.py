"""``python -m d2ldev``: the command line."""

from d2ldev.cli.main import main

main()
