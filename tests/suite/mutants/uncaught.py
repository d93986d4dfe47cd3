"""The requirements that no mutant is caught by, with the reason. The list may only shrink."""

UNCAUGHT = {
    "gpus.a-copy-that-does-not-fit": "it fills all of a card's memory",
    "processes.share-a-real-gpu-or-say-so": "it needs a library that is for cards alone",
    "processes.train-on-the-cpu-beside-a-gpu": "it needs a library that is for cards alone",
}
