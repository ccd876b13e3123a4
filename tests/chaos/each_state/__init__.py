"""A package, so that its cluster ends with it: pytest takes a mere folder as part of the whole session."""
