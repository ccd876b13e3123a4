"""What several test folders share: real workers as processes, a client, oracles, leak checks."""
