"""Which prefill and which decode worker serve a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from diptych.router.call import Call
from diptych.router.errors import RouterError
from diptych.router.models import model_for
from diptych.router.policies import Policy, configured_policy
from diptych.router.registry import WorkerRegistry
from diptych.router.workers import Worker, WorkerRole


@dataclasses.dataclass(frozen=True)
class Pair:
    prefill: Worker
    decode: Worker


class Pairing:
    """Joins a policy per side with what is known of the workers: who is healthy, whose breaker is closed."""

    def __init__(self, registry: WorkerRegistry, prefill_policy: Policy, decode_policy: Policy) -> None:
        self._registry = registry
        self._policies = {WorkerRole.PREFILL: prefill_policy, WorkerRole.DECODE: decode_policy}
        registry.subscribe(self)

    @classmethod
    def configured(cls, registry: WorkerRegistry) -> Pairing:
        """With the policies that are set."""
        return cls(registry, configured_policy(WorkerRole.PREFILL), configured_policy(WorkerRole.DECODE))

    def added(self, worker: Worker) -> None:
        self._policies[worker.role].added(worker)

    def removed(self, worker: Worker) -> None:
        self._policies[worker.role].removed(worker)

    def pick(self, call: Call, avoid: Collection[Worker] = ()) -> Pair:
        """A pair for one attempt; workers in `avoid` only when a side has no other.

        Raises RouterError: 503 when a side has no healthy worker, 404 for a model that nobody serves.
        """
        model = model_for(self._registry, call.model)
        healthy = {role: self._registry.healthy(role, serving=model) for role in WorkerRole}
        if not all(healthy.values()):
            missing = self._registry.missing(model)
            raise RouterError(503, f"the request can't be served now: {missing}", retry_after=1)
        return Pair(
            prefill=self._pick(healthy[WorkerRole.PREFILL], call, avoid),
            decode=self._pick(healthy[WorkerRole.DECODE], call, avoid),
        )

    def _pick(self, candidates: list[Worker], call: Call, avoid: Collection[Worker]) -> Worker:
        role = candidates[0].role
        # An open breaker and a failed attempt only say where not to go while there is somewhere else. With
        # no other worker the request is tried: a likely failure is no worse than a certain one.
        candidates = [w for w in candidates if w.breaker.passes] or candidates
        candidates = [w for w in candidates if w not in avoid] or candidates
        return self._policies[role].pick(candidates, call)
