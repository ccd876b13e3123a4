"""Builds a scheduler from the published bags: device, model, KV pool, attention, role.

The one place where configuration meets the engine: everything below it takes plain arguments.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from diptych.common_config import (
    get_context,
    get_device,
    get_disagg,
    get_exec,
    get_memory,
    get_model,
    get_schedule,
    turn_off_chunked_prefix_cache,
)
from diptych.engine.grammar import CompilerLink, Grammars
from diptych.engine.kv_layout import Fingerprint, KVLayout
from diptych.engine.kv_pool import KVPool
from diptych.engine.models.config import ModelConfig
from diptych.engine.models.decoder import DecoderLM
from diptych.engine.models.errors import ModelError
from diptych.engine.prompt_queue import PromptQueue
from diptych.engine.runner import ModelRunner, RunnerFacts
from diptych.engine.running_batch import RunningBatch
from diptych.engine.scheduler import SchedulerParts
from diptych.engine.weight_update import LoadWeights, NewWeights, WeightsRefused
from diptych.engine.weights.identity import dummy_identity, model_identity
from diptych.engine.weights.loader import load_model
from diptych.kernels.registry import make_attention_backend, resolve_attention_backend
from diptych.kvtransfer.faults.injector import Injector
from diptych.kvtransfer.faults.parts import faulty_parts
from diptych.kvtransfer.parts import TransferParts
from diptych.kvtransfer.sender import PrefillSender
from diptych.launch.errors import StartupError
from diptych.launch.faults import parse_rules
from diptych.prefill.optimistic import OptimisticPrompts
from diptych.prefill.scheduler import PrefillScheduler

logger = logging.getLogger(__name__)


def choose_device() -> torch.device:
    wanted = get_device().device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: PyTorch finds no usable CUDA device on this machine")
    torch.set_num_threads(get_device().cpu_threads)
    return torch.device(wanted)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_runner(model_dir: Path, report: Callable[[str], None]) -> ModelRunner:
    """Load the model and allocate its KV pool. Raises `StartupError` or the loader's typed errors."""
    device = choose_device()
    config = ModelConfig.from_dir(model_dir)
    dtype = config.dtype if get_model().dtype == "auto" else get_model().dtype
    context_length = _context_length(config)
    model = load_model(
        model_dir,
        dtype=_torch_dtype(dtype),
        device=device,
        load_format=get_model().load_format,
        linear_backend=get_exec().kernel.linear_backend,
        seed=get_model().random_seed,
        batch_invariant=not get_exec().features.disable_batch_invariance,
        torch_compile=get_exec().graph.enable_torch_compile,
        progress=lambda done, total: _report_quarters(report, done, total),
    )
    kv_dtype = dtype if get_memory().kv_cache_dtype == "auto" else get_memory().kv_cache_dtype
    layout = config.kv_layout(get_schedule().page_size, kv_dtype)
    num_pages = _num_pages(layout, device)
    _require_memory(layout, num_pages, device)
    pool = KVPool(layout, num_pages, device=device, cache=not get_memory().disable_radix_cache)

    asked = get_exec().kernel.attention_backends
    prefill_name = resolve_attention_backend(asked.prefill, device)
    decode_name = resolve_attention_backend(asked.decode, device)
    prefill_backend = make_attention_backend(
        prefill_name, pool.slab, num_q_heads=config.num_q_heads, scale=config.scale
    )
    decode_backend = (
        prefill_backend
        if decode_name == prefill_name
        else make_attention_backend(
            decode_name, pool.slab, num_q_heads=config.num_q_heads, scale=config.scale
        )
    )
    facts = RunnerFacts(
        prefill_attention_backend=prefill_backend.name,
        decode_attention_backend=decode_backend.name,
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_length=context_length,
        load_format=get_model().load_format,
        linear_backend=model.linear_backend,
        batch_invariant=model.batch_invariant,
        torch_compile=model.torch_compile,
    )
    if get_schedule().chunked_prefill_enabled and not prefill_backend.supports_chunked_prefix:
        # Scheduler, pool and transfer read the bag, so that is where the gate must land.
        turn_off_chunked_prefix_cache(
            f"attention backend {prefill_backend.name} can't attend to a cached prefix",
            context_length=context_length,
        )
    report(
        f"KV pool: {pool.allocator.total} pages of {layout.page_size} tokens "
        f"({pool.slab.nbytes / 2**20:.0f} MiB), attention {prefill_backend.name}/{decode_backend.name}, "
        f"linear {model.linear_backend}, {dtype} on {device}"
    )
    return ModelRunner(
        model,
        pool,
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        device=device,
        facts=facts,
    )


def weights_loader(runner: ModelRunner) -> LoadWeights:
    """Loads weights to take the place of the runner's, for its pool, device and backends."""
    config, facts = runner.model.config, runner.facts
    device, seed = runner.pool.slab.device, get_model().random_seed

    def load(model_dir: Path, load_format: str) -> NewWeights:
        try:
            _require_same_model(config, ModelConfig.from_dir(model_dir))
            model: DecoderLM = load_model(
                model_dir,
                dtype=_torch_dtype(facts.dtype),
                device=device,
                load_format=load_format,
                linear_backend=facts.linear_backend,
                seed=seed,
                batch_invariant=facts.batch_invariant,
                torch_compile=facts.torch_compile,
            )
            return NewWeights(model, fingerprint(runner, model_dir, load_format, seed))
        except (ModelError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise WeightsRefused(str(error)) from error

    return load


def _require_same_model(served: ModelConfig, new: ModelConfig) -> None:
    """Raises `WeightsRefused` unless only the weights differ: pool, tokenizer and context stay."""
    here = asdict(served)
    differences = [
        f"{name} is {value!r}, here {here[name]!r}"
        for name, value in asdict(new).items()
        # What the weights are kept in on disk; they are cast.
        if name != "dtype" and value != here[name]
    ]
    if differences:
        raise WeightsRefused(f"another model needs a restart: {'; '.join(differences)}")


def build_grammars(config: ModelConfig, model_dir: Path) -> Grammars | None:
    """None if this worker follows no grammars. The library isn't loaded yet, only looked for."""
    if get_exec().grammar.grammar_backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        get_context().override("xgrammar is not installed", grammar_backend="none")
        logger.warning("xgrammar is not installed: requests with a grammar are refused")
    if get_exec().grammar.grammar_backend == "none":
        return None
    link = CompilerLink(
        model_dir,
        vocab_size=config.vocab_size,
        end_ids=config.eos_token_ids,
        any_whitespace=not get_exec().grammar.disable_any_whitespace,
    )
    return Grammars(link, timeout=get_exec().grammar.grammar_compile_timeout)


def build_prompt_queue(runner: ModelRunner, keep_free: Callable[[], int]) -> PromptQueue:
    schedule = get_schedule()
    return PromptQueue(
        runner.pool,
        token_budget=schedule.prefill_token_budget,
        chunked=schedule.chunked_prefill_enabled,
        reuse_prefix=not schedule.disable_chunked_prefix_cache,
        keep_free=keep_free,
    )


def build_prefill_scheduler(parts: SchedulerParts, sender: PrefillSender) -> PrefillScheduler:
    pool = parts.runner.pool
    ahead = build_prompt_queue(parts.runner, keep_free=lambda: 0)
    return PrefillScheduler(
        parts,
        sender,
        build_prompt_queue(parts.runner, keep_free=lambda: 0),
        OptimisticPrompts(
            ahead, pool, max_pages=int(get_disagg().max_optimistic_fraction * pool.allocator.total)
        ),
        max_running=get_schedule().max_running_requests,
        overlap_transfer=not get_exec().overlap.disable_overlap_transfer,
    )


def build_running_batch(runner: ModelRunner) -> RunningBatch:
    return RunningBatch(runner.pool, reserved_tokens=get_schedule().num_reserved_decode_tokens)


def fingerprint(runner: ModelRunner, model_dir: Path, load_format: str, seed: int) -> Fingerprint:
    """What the peer cluster's worker must have in common with this one, serving weights from `model_dir`."""
    layout = runner.pool.layout
    return Fingerprint(
        model=dummy_identity(model_dir, seed) if load_format == "dummy" else model_identity(model_dir),
        dtype=runner.facts.dtype,
        kv_dtype=layout.dtype,
        num_layers=layout.num_layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        vocab_size=runner.model.config.vocab_size,
    )


def _report_quarters(report: Callable[[str], None], done: int, total: int) -> None:
    """One line per quarter of the layers: enough to see that a big model is getting on."""
    if done * 4 // total > (done - 1) * 4 // total:
        report(f"loading weights: {done} of {total} layers")


def _context_length(config: ModelConfig) -> int:
    asked = get_model().context_length
    if asked is not None and asked > config.max_context:
        raise StartupError(
            f"--context-length {asked} is over the {config.max_context} tokens that the model supports"
        )
    return asked or config.max_context


def _require_memory(layout: KVLayout, num_pages: int, device: torch.device) -> None:
    """Before the allocator is asked, whose own message names neither the flag nor the sizes."""
    needed = num_pages * layout.page_bytes
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = psutil.virtual_memory().available
    if needed > available:
        raise StartupError(
            f"a KV pool of {num_pages * layout.page_size} tokens needs {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are available; lower --max-total-tokens or --mem-fraction-static"
        )


def _num_pages(layout: KVLayout, device: torch.device) -> int:
    """From --max-total-tokens, else from what --mem-fraction-static leaves beside the loaded weights."""
    memory = get_memory()
    if memory.max_total_tokens is not None:
        return layout.pages_for(memory.max_total_tokens)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(memory.mem_fraction_static * total) - (total - free)
    else:
        budget = int(memory.mem_fraction_static * psutil.virtual_memory().available)
    pages = budget // layout.page_bytes
    if pages < 1:
        raise StartupError(
            f"--mem-fraction-static {memory.mem_fraction_static} leaves no room for a single KV page of "
            f"{layout.page_bytes} bytes; raise it or set --max-total-tokens"
        )
    return pages


def with_faults(parts: TransferParts) -> tuple[TransferParts, Injector | None]:
    """The parts as they are, and no injector, unless `enable_fault_injection` is on."""
    disagg = get_disagg()
    if not disagg.enable_fault_injection:
        return parts, None
    logger.warning(
        "FAULT INJECTION IS ON: whoever reaches POST /faults can lose, damage and hold up requests. Not for "
        "production."
    )
    injector = Injector(
        parts.stats,
        seed=disagg.fault_injection_seed,
        rules=parse_rules(disagg.fault_injection_rules or "[]"),
        clock=parts.clock,
    )
    return faulty_parts(parts, injector), injector
