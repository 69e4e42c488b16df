"""What all tests share."""

import hypothesis  # noqa: F401  (its pytest plugin imports it at the very end otherwise, where a warning can upset the parser)
