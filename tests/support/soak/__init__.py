"""A seeded random soak: traffic, faults and restarts against real workers, and what must hold."""
