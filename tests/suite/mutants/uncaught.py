"""The requirements that no mutant is caught by, with the reason. The list may only shrink."""

CARD = "only a card has a driver, a queue and memory of its own"

UNCAUGHT = {
    "gpus.a-copy-that-does-not-fit": CARD,
    "gpus.counting-makes-no-context": CARD,
    "gpus.device-of-is-native": CARD,
    "gpus.hidden-gpus-are-not-counted": CARD,
    "gpus.large-copies": CARD,
    "gpus.made-in-place": CARD,
    "gpus.strict-variable": CARD,
    "gpus.synchronizing-makes-no-context": CARD,
    "memory.a-copy-is-freed": CARD,
    "memory.follows-an-allocation": CARD,
    "memory.other-devices-are-not-counted": CARD,
    "memory.total": CARD,
    "processes.share-a-real-gpu-or-say-so": CARD,
    "processes.train-on-the-cpu-beside-a-gpu": CARD,
    "sync.queue-is-seen": CARD,
}
