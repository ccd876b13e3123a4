"""What grammars may take."""

BRIEF_SECONDS = 0.25
"""Processor time of a first try, which is enough for nearly all. What takes longer waits behind it."""
BRIEF_AT_ONCE = 4
LONG_AT_ONCE = 2
"""Second tries, with all the time that a grammar may take."""
MAX_LONG = 32
"""Second tries that run or wait."""
MAX_COMPILING = 256
"""All that run or wait."""
BRIEF_NICENESS = 5
"""Tokens come first."""
LONG_NICENESS = 10

MEMORY_BYTES = 1 << 30
"""Of the process that compiles it, beside what is loaded there."""
MAX_COMPILED_BYTES = 64 << 20
"""Serialised; the scheduler keeps about as much."""
