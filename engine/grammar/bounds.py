"""What one grammar may take."""

MEMORY_BYTES = 1 << 30
"""Of the process that compiles it, beside what is loaded there."""
MAX_COMPILED_BYTES = 64 << 20
"""Serialised; the scheduler keeps about as much."""
