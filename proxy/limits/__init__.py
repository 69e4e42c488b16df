"""Limits: what they are, how each algorithm counts, and the one script call that decides over all of them."""
