"""Why a worker can't start."""


class StartupError(Exception):
    """The worker can't start as it was configured. The message is for the operator."""
