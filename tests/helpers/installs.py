"""The extras in the lines that install d2ldev, which differ with where this d2ldev came from."""

import re

_LINE = re.compile(r"pip install (?:-e )?'[^'\n]*\[([\w-]+)\][^'\n]*'")


def find_extras(text):
    """Return the extra of each install line in a text."""
    return _LINE.findall(text)
