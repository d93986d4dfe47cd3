"""Several processes that train one model: who they are, and what becomes of one that is lost."""
