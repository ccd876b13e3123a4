"""What resolution fills in, and which combinations it refuses.

A rule fills or changes one leaf; a check looks at several. Both name the leaves they look at: they run only
where the program has all of them and all were readable, so that one mistake gives one message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import msgspec

from diptych.common_config.namespaces import LEAVES
from diptych.common_config.namespaces.router import DEFAULT_PORT, PrefillAddress, parse_url
from diptych.common_config.programs import Program


@dataclass(frozen=True, slots=True)
class Draft:
    """A launch while it is being resolved."""

    program: Program
    values: Mapping[str, Any]
    env: Mapping[str, str]
    given: frozenset[str]
    """Leaves that a file, a variable or a flag set."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Rule:
    leaf: str
    needs: tuple[str, ...]
    compute: Callable[[Draft], object]
    name: str
    """How provenance names the rule."""


@dataclass(frozen=True, slots=True)
class Check:
    needs: tuple[str, ...]
    find: Callable[[Draft], Iterator[str]]


RULES: list[Rule] = []
CHECKS: list[Check] = []


def rule(
    leaf: str, *needs: str, name: str
) -> Callable[[Callable[[Draft], object]], Callable[[Draft], object]]:
    """The function returns the leaf's resolved value (the value it has, where the rule does not apply)."""

    def register(compute: Callable[[Draft], object]) -> Callable[[Draft], object]:
        RULES.append(Rule(leaf, (leaf, *needs), compute, name))
        return compute

    return register


def check(
    *needs: str,
) -> Callable[[Callable[[Draft], Iterator[str]]], Callable[[Draft], Iterator[str]]]:
    """The function yields a sentence for each problem."""

    def register(find: Callable[[Draft], Iterator[str]]) -> Callable[[Draft], Iterator[str]]:
        CHECKS.append(Check(needs, find))
        return find

    return register


@rule("served_model_name", "model_path", name="named after the model path")
def _served_model_name(draft: Draft) -> object:
    path: str = draft.model_path
    local = path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")
    return draft.served_model_name or (PurePath(path).name if local else "") or path


@rule("tokenizer_path", "model_path", name="the model's own tokenizer")
def _tokenizer_path(draft: Draft) -> object:
    return draft.tokenizer_path or draft.model_path


@rule("model_cache_dir", name="the user's cache folder")
def _model_cache_dir(draft: Draft) -> object:
    base = draft.env.get("XDG_CACHE_HOME") or str(Path(draft.env.get("HOME") or "~").expanduser() / ".cache")
    return draft.model_cache_dir or str(Path(base) / "diptych")


@rule("chunked_prefill_size", "disable_chunked_prefix_cache", name="off without a chunked prefix cache")
def _chunked_prefill_size(draft: Draft) -> object:
    return -1 if draft.disable_chunked_prefix_cache else draft.chunked_prefill_size


@rule("cpu_threads", name="the cores that this process may use")
def _cpu_threads(draft: Draft) -> object:
    return draft.cpu_threads or len(os.sched_getaffinity(0))


@rule("disaggregation_advertise_host", "host", name="from the address to listen on")
def _advertise_host(draft: Draft) -> object:
    everywhere = draft.host in ("0.0.0.0", "::", "*")
    return draft.disaggregation_advertise_host or ("127.0.0.1" if everywhere else draft.host)


@rule("prefill", "default_bootstrap_port", name="with the default bootstrap port")
def _prefill(draft: Draft) -> object:
    def filled(address: PrefillAddress) -> PrefillAddress:
        if address.bootstrap_port != DEFAULT_PORT:
            return address
        return msgspec.structs.replace(address, bootstrap_port=draft.default_bootstrap_port)

    return tuple(filled(address) for address in draft.prefill)


@rule("connect_timeout", "request_timeout", name="no longer than a request")
def _connect_timeout(draft: Draft) -> object:
    if "connect_timeout" in draft.given:  # what was asked is refused by a check, never changed
        return draft.connect_timeout
    return min(draft.connect_timeout, draft.request_timeout)


@check("tp_size")
def _tensor_parallel(draft: Draft) -> Iterator[str]:
    if draft.tp_size > 1:
        yield f"--tp-size {draft.tp_size}: tensor parallelism is not supported yet; leave it at 1"


@check("pp_size")
def _pipeline_parallel(draft: Draft) -> Iterator[str]:
    if draft.pp_size > 1:
        yield f"--pp-size {draft.pp_size}: pipeline parallelism is not supported yet; leave it at 1"


@check("dp_size")
def _data_parallel(draft: Draft) -> Iterator[str]:
    if draft.dp_size > 1:
        yield f"--dp-size {draft.dp_size}: data parallelism is not supported yet; start more workers instead"


@check("max_total_tokens", "page_size")
def _pool_holds_a_page(draft: Draft) -> Iterator[str]:
    if draft.max_total_tokens is not None and draft.max_total_tokens < draft.page_size:
        yield (
            f"--max-total-tokens {draft.max_total_tokens} holds not even one page of "
            f"--page-size {draft.page_size}"
        )


@check(
    "device", "linear_backend", "attention_backend", "prefill_attention_backend", "decode_attention_backend"
)
def _cpu_kernels_on_cuda(draft: Draft) -> Iterator[str]:
    if draft.device != "cuda":
        return
    if draft.linear_backend == "onednn":
        yield "--linear-backend onednn computes on the CPU and contradicts --device cuda"
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if draft.values[name] == "cpu":
            yield f"{LEAVES[name].flag} cpu computes on the CPU and contradicts --device cuda"


@check("port", "disaggregation_bootstrap_port", "disaggregation_control_port")
def _distinct_ports(draft: Draft) -> Iterator[str]:
    ports: dict[int, str] = {}
    names = ["port", "disaggregation_control_port"]
    if draft.program is Program.PREFILL:  # no other opens a bootstrap service on a port it was told
        names.append("disaggregation_bootstrap_port")
    for name in names:
        port = draft.values[name]
        flag = LEAVES[name].flag
        if port and port in ports:
            yield f"{flag} and {ports[port]} are both {port}; each needs a port of its own"
        ports[port] = flag


@check("disaggregation_transfer_backend", "nixl_ucx_tls", "mooncake_protocol", "disaggregation_ib_device")
def _settings_of_another_transfer_backend(draft: Draft) -> Iterator[str]:
    backend = draft.disaggregation_transfer_backend
    if draft.nixl_ucx_tls and backend != "nixl":
        yield (
            f"--nixl-ucx-tls {draft.nixl_ucx_tls} means nothing to "
            f"--disaggregation-transfer-backend {backend}"
        )
    if draft.mooncake_protocol != "tcp" and backend != "mooncake":
        yield (
            f"--mooncake-protocol {draft.mooncake_protocol} means nothing to "
            f"--disaggregation-transfer-backend {backend}"
        )
    if draft.disaggregation_ib_device and draft.mooncake_protocol != "rdma":
        yield (
            f"--disaggregation-ib-device {draft.disaggregation_ib_device} names RDMA devices: it needs "
            f"--disaggregation-transfer-backend mooncake --mooncake-protocol rdma"
        )


@check("enable_fault_injection", "fault_injection_rules")
def _faults_without_injection(draft: Draft) -> Iterator[str]:
    if draft.fault_injection_rules and not draft.enable_fault_injection:
        yield "--fault-injection-rules needs --enable-fault-injection"


@check("api_key", "admin_api_key")
def _keys(draft: Draft) -> Iterator[str]:
    for name in ("api_key", "admin_api_key"):
        key = draft.values[name]
        if key is not None and (not key.isascii() or " " in key):
            yield f"{LEAVES[name].flag} must be ASCII without spaces: it travels in an HTTP header"
    if draft.api_key and draft.admin_api_key == draft.api_key:
        yield "--admin-api-key is the same as --api-key: leave it out, or take another"


@check("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")
def _tls_without_a_certificate(draft: Draft) -> Iterator[str]:
    for name in ("ssl_keyfile", "ssl_keyfile_password"):
        if draft.values[name] is not None and draft.ssl_certfile is None:
            yield f"{LEAVES[name].flag} needs --ssl-certfile"


MIN_SECRET = 16


@check("cluster_secret")
def _cluster_secret(draft: Draft) -> Iterator[str]:
    if draft.cluster_secret is not None and len(draft.cluster_secret) < MIN_SECRET:
        yield (
            f"--cluster-secret has fewer than {MIN_SECRET} characters, which can be guessed; "
            "`openssl rand -hex 32` makes one"
        )


@check("worker_ca_file", "worker_tls_verify")
def _ca_without_verification(draft: Draft) -> Iterator[str]:
    if draft.worker_ca_file is not None and not draft.worker_tls_verify:
        yield "--worker-ca-file means nothing with --no-worker-tls-verify"


@check("default_max_tokens", "context_length")
def _default_fits_context(draft: Draft) -> Iterator[str]:
    if draft.default_max_tokens and draft.context_length and draft.default_max_tokens >= draft.context_length:
        yield (
            f"--default-max-tokens {draft.default_max_tokens} leaves no room for a prompt in "
            f"--context-length {draft.context_length}"
        )


@check("connect_timeout", "request_timeout")
def _connecting_is_part_of_a_request(draft: Draft) -> Iterator[str]:
    if draft.connect_timeout > draft.request_timeout:
        yield (
            f"--connect-timeout {draft.connect_timeout:g} is longer than "
            f"--request-timeout {draft.request_timeout:g}, of which it is a part"
        )


_REFUSED = tuple(name for name, leaf in LEAVES.items() if leaf.refused_by)


@check(*_REFUSED)
def _settled_by_the_program(draft: Draft) -> Iterator[str]:
    for name in _REFUSED:
        why = LEAVES[name].refused_by.get(draft.program)
        if why and name in draft.given and draft.values[name] != LEAVES[name].default_for(draft.program):
            yield f"{LEAVES[name].flag}: {draft.program.value} {why}"


@check("advertise_url", "router_url")
def _registration(draft: Draft) -> Iterator[str]:
    for url in sorted({url for url in draft.router_url if draft.router_url.count(url) > 1}):
        yield f"--router-url {url} is given twice"
    if draft.advertise_url is None:
        return
    try:
        parse_url([draft.advertise_url])
    except ValueError as error:
        yield f"--advertise-url: {error}"
    if not draft.router_url:
        yield "--advertise-url is for routers, and there is no --router-url"


@check("prefill", "decode")
def _router_workers(draft: Draft) -> Iterator[str]:
    if draft.program is Program.LOCAL:
        return
    prefills = [address.url for address in draft.prefill]
    for url in sorted({url for url in prefills if prefills.count(url) > 1}):
        yield f"--prefill {url} is given twice"
    for url in sorted({url for url in draft.decode if draft.decode.count(url) > 1}):
        yield f"--decode {url} is given twice"
    for url in sorted(set(prefills) & set(draft.decode)):
        yield f"{url} is given as both --prefill and --decode; a worker is one of them"
