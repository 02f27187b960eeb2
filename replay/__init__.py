"""Meaning: the event vocabulary, the state that it folds to, the restore plan, and the post-mortem over both."""
