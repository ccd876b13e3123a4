"""`launch-prefill` with an attention in place of `torch_native` that can't attend to what an earlier step
stored: `whole_prompts.py FLAGS…`. Without flags it is the scheduler process that such a worker starts."""

import sys

from diptych.kernels import registry
from diptych.kernels.interface import AttentionStep
from diptych.kernels.torch_native import TorchNativeAttention


class WholePromptsOnly(TorchNativeAttention):
    supports_chunked_prefix = False

    def begin_step(self, step: AttentionStep) -> None:
        """Ends the worker if it is asked for what it says it can't do."""
        assert step.is_decode or step.query_lens == step.seq_lens, "a prefill step attends to a stored prefix"
        super().begin_step(step)


if __name__ == "__main__":
    registry.TorchNativeAttention = WholePromptsOnly  # type: ignore[misc]
    if sys.argv[1:]:
        from diptych.launch.worker import run_worker
        from diptych.server.frontend import WorkerKind

        sys.exit(run_worker(WorkerKind.PREFILL, sys.argv[1:], scheduler_command=[sys.executable, __file__]))
    from diptych.launch.scheduler import main

    sys.exit(main())
