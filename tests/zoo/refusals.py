"""What d2ldev refuses of the models of the zoo, and why: ``find_reason`` knows the messages."""

from __future__ import annotations

# Words of the message, and the reason as the page "Models of others" has it.
REFUSALS: list[tuple[str, str]] = [
    (
        "moves by its own to(), and shows nothing else",
        "The batch moves by its own `to`, and nothing says which of its tensors have a row of each "
        "example: it cannot be split. Give tensors, or register the class.",
    ),
]


def find_reason(message: str) -> str:
    """Return why a model is refused with such a message; empty if nobody expects it."""
    return next((reason for words, reason in REFUSALS if words in message), "")
