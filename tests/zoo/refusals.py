"""What d2ldev refuses of the models of the zoo, or tells to be different, and why."""

from __future__ import annotations

# Words of a message, and the reason as the page "Models of others" has it.
REFUSALS: list[tuple[str, str]] = [
    (
        "moves by its own to(), and shows nothing else",
        "The batch moves by its own `to`, and nothing says which of its tensors have a row of each "
        "example: it cannot be split. Give tensors, or register the class.",
    ),
    (
        "0 embeddings differs by",
        "On one GPU, as in Keras's own `fit`, Adam takes the rows of a repeated token for several "
        "gradients. [On two GPUs they are one](explanation/several-devices.md).",
    ),
]


def find_reason(message: str) -> str:
    """Return why there is such a message; empty if nobody expects it."""
    return next((reason for words, reason in REFUSALS if words in message), "")
