"""Everything that can go wrong with configuration, as typed errors with a way out in the message."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration that can't be used. `problems` lists everything found, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            text = "\n".join(
                [f"{len(self.problems)} problems in the configuration:", *(f"  - {p}" for p in problems)]
            )
        super().__init__(text)


class FrozenRecordError(AttributeError):
    """Something tried to assign to a resolved record."""


class SealedBagError(AttributeError):
    """Something tried to assign to a published bag."""


class NotPublishedError(RuntimeError):
    """A bag was read before this process published its record, or one that its program does not have."""


class RoleNamespaceError(RuntimeError):
    """Under `DIPTYCH_ROLE_NAMESPACES=enforce`: a role read a namespace outside its set."""
