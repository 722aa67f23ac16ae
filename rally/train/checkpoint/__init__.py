"""Writing, reading and merging checkpoints."""
