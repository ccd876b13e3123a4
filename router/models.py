"""Which workers may serve a request for a model, where workers of several models stand behind one router."""

from __future__ import annotations

from diptych.router.errors import RouterError
from diptych.router.registry import WorkerRegistry
from diptych.router.workers import Worker, WorkerRole

ANY_MODEL = "default"
"""A name that every worker answers to."""


def served_names(workers: list[Worker]) -> list[str]:
    """What the workers are known to answer to, in their order, each name once."""
    return list(dict.fromkeys(name for worker in workers for name in sorted(worker.models or ())))


def model_for(registry: WorkerRegistry, asked: str | None) -> str | None:
    """The name by which both workers of a pair must go; None where it makes no difference.

    While all workers serve the same, a name is theirs to judge. Else it is looked up here: RouterError (404)
    for one that nobody has. A request that names none gets the first model that has a healthy pair. A worker
    that hasn't said what it serves is taken for any."""
    known = {worker.models for worker in registry.workers if worker.models is not None}
    if len(known) < 2:
        return None
    names = served_names(registry.workers)
    if asked is None or asked == ANY_MODEL:
        return next((name for name in names if _has_pair(registry, name)), None)
    if asked not in names:
        shown = ", ".join(repr(name) for name in names)
        raise RouterError(
            404, f"the model {asked!r} is not served here; {shown} are", code="model_not_found", param="model"
        )
    return asked


def _has_pair(registry: WorkerRegistry, name: str) -> bool:
    """Whether each side has a healthy worker that is known to serve it, or to serve anything."""
    return all(any(w.answers_to(name) for w in registry.healthy(role)) for role in WorkerRole)
