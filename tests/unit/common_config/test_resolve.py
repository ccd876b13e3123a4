"""What resolution fills in, and which combinations it refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from unit.common_config.samples import WORKERS

from diptych.common_config import ConfigError, PrefillAddress, Program, environment_of, resolve
from diptych.common_config.record import LaunchConfig


def worker(program: Program = Program.PREFILL, **flags: object) -> LaunchConfig:
    return resolve(program, flags={"model_path": "m", **flags}, env={"HOME": "/home/a"})


def problems(program: Program = Program.PREFILL, **flags: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        worker(program, **flags)
    return caught.value.problems


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("org/model", "org/model"), ("/data/models/tiny/", "tiny"), ("./x.gguf", "x.gguf")),
        *(("plain", "plain"), ("./", "./")),
    ],
)
def test_the_served_name_follows_the_model_path_without_local_folders(path: str, name: str) -> None:
    record = worker(model_path=path)
    assert record.served_model_name == name
    assert str(record.provenance["served_model_name"]) == "resolved: named after the model path"
    assert worker(model_path=path, served_model_name="own").served_model_name == "own"


def test_the_tokenizer_is_the_models_unless_named() -> None:
    assert worker(model_path="org/m").tokenizer_path == "org/m"
    assert worker(tokenizer_path="t").tokenizer_path == "t"


def test_the_cache_folder_follows_xdg() -> None:
    assert worker().model_cache_dir == "/home/a/.cache/diptych"
    record = resolve(Program.LOCAL, env={"XDG_CACHE_HOME": "/x"})
    assert record.model_cache_dir == "/x/diptych"
    assert worker(model_cache_dir="/y").model_cache_dir == "/y"


@pytest.mark.parametrize(
    ("host", "advertised"), [("10.0.0.7", "10.0.0.7"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1")]
)
def test_the_advertised_host_is_an_address_that_peers_can_reach(host: str, advertised: str) -> None:
    assert worker(host=host).disaggregation_advertise_host == advertised
    assert worker(host=host, disaggregation_advertise_host="n1").disaggregation_advertise_host == "n1"


def test_cpu_threads_are_the_cores_that_this_process_may_use() -> None:
    assert worker().cpu_threads == len(os.sched_getaffinity(0))
    assert worker(cpu_threads=3).cpu_threads == 3


def test_without_a_chunked_prefix_cache_there_are_no_chunks_and_provenance_says_why() -> None:
    record = worker(disable_chunked_prefix_cache=True, chunked_prefill_size="64")
    assert record.chunked_prefill_size == -1
    assert str(record.provenance["chunked_prefill_size"]) == (
        "resolved: off without a chunked prefix cache (asked: 64 by flag: --chunked-prefill-size)"
    )
    assert worker(chunked_prefill_size=64).chunked_prefill_size == 64


def test_prefill_addresses_get_the_default_bootstrap_port_unless_they_say() -> None:
    prefill = [["http://a:1"], ["http://b:1", "7"], ["http://c:1/", "none"]]
    record = resolve(
        Program.ROUTER, flags={**WORKERS, "prefill": prefill, "default_bootstrap_port": "55"}, env={}
    )
    assert record.prefill == (
        PrefillAddress("http://a:1", 55),
        PrefillAddress("http://b:1", 7),
        PrefillAddress("http://c:1", None),
    )
    file = {
        "prefill": ["http://a:1 6", {"url": "http://b:1", "bootstrap_port": None}],
        "decode": ["http://d:1"],
    }
    assert resolve(Program.ROUTER, file=file, env={}).prefill == (
        PrefillAddress("http://a:1", 6),
        PrefillAddress("http://b:1", None),
    )
    env = {"DIPTYCH_PREFILL": "http://a:1 6,http://b:1", "DIPTYCH_DECODE": "http://d:1,http://e:1"}
    assert resolve(Program.ROUTER, env=env).decode == ("http://d:1", "http://e:1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp_size": 2}, "--tp-size 2: tensor parallelism is not supported yet"),
        ({"pp_size": 2}, "--pp-size 2: pipeline parallelism is not supported yet"),
        ({"dp_size": 2}, "--dp-size 2: data parallelism is not supported yet"),
        ({"max_total_tokens": 15}, "--max-total-tokens 15 holds not even one page of --page-size 16"),
        ({"device": "cuda", "linear_backend": "onednn"}, "--linear-backend onednn .* --device cuda"),
        ({"device": "cuda", "attention_backend": "cpu"}, "--attention-backend cpu .* --device cuda"),
        ({"port": 8998}, "--disaggregation-bootstrap-port and --port are both 8998"),
        ({"context_length": 8, "default_max_tokens": 8}, "--default-max-tokens 8 leaves no room"),
    ],
)
def test_impossible_combinations_are_refused(flags: dict[str, object], message: str) -> None:
    (problem,) = problems(**flags)
    assert re.search(message, problem), problem


def test_a_short_request_timeout_shortens_the_connect_timeout_unless_that_was_asked() -> None:
    record = resolve(Program.ROUTER, flags={**WORKERS, "request_timeout": 1}, env={})
    assert record.connect_timeout == 1
    assert str(record.provenance["connect_timeout"]) == "resolved: no longer than a request"
    with pytest.raises(ConfigError, match=r"--connect-timeout 5 is longer .* comes from DIPTYCH_CONNECT"):
        resolve(
            Program.ROUTER,
            flags={**WORKERS, "request_timeout": 1},
            env={"DIPTYCH_CONNECT_TIMEOUT": "5"},
        )


def test_only_a_worker_with_a_bootstrap_service_minds_its_port() -> None:
    assert worker(Program.DECODE, port=8998).port == 8998
    assert worker(Program.LOCAL, port=8998).port == 8998


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill": [["http://a:1"], ["http://a:1", "3"]]}, "--prefill http://a:1 is given twice"),
        ({**WORKERS, "decode": [["http://127.0.0.1:1"]]}, "is given as both --prefill and --decode"),
        ({**WORKERS, "connect_timeout": 9, "request_timeout": 8}, "--connect-timeout 9 is longer than"),
    ],
)
def test_routers_that_could_not_route_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Program.ROUTER, flags=flags, env={})
    assert any(message in problem for problem in caught.value.problems)


def test_a_router_may_start_without_workers_which_come_later() -> None:
    assert resolve(Program.ROUTER, env={}).prefill == ()


def test_launch_local_refuses_workers_of_others() -> None:
    with pytest.raises(ConfigError, match="launch-local starts its own workers"):
        resolve(Program.LOCAL, flags={"decode": [["http://a:1"]]}, env={})


def test_a_problem_with_a_combination_says_where_a_value_came_from() -> None:
    with pytest.raises(ConfigError, match=r"leave it at 1 \(tp_size comes from DIPTYCH_TP_SIZE\)"):
        resolve(Program.LOCAL, env={"DIPTYCH_TP_SIZE": "2"})


def test_all_problems_come_at_once_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("page_sise: 3\nschedule:\n  chunked_prefill_size: many\n")
    with pytest.raises(ConfigError) as caught:
        resolve(
            Program.PREFILL,
            file=path,
            env={"DIPTYCH_PORT": "80 80", "DIPTYCH_PAGE_SIZES": "4"},
            flags={"tp_size": "2", "page_size": "0", "disable_chunked_prefix_cache": "true"},
        )
    assert list(caught.value.problems) == [
        f"{path}: unknown key 'page_sise'; did you mean page_size?",
        f"{path}: chunked_prefill_size: 'many' is not a whole number of at least 1, or -1",
        "environment variable DIPTYCH_PORT: '80 80' is not a whole number from 0 to 65535",
        "environment: unknown variable DIPTYCH_PAGE_SIZES; did you mean DIPTYCH_PAGE_SIZE?",
        "--page-size: 0 is not a whole number from 1 to 4096",
        "--model-path is missing: A directory, a .gguf file, a hub id, or smollm2-135m-instruct for the "
        "packaged default model.",
        "--tp-size 2: tensor parallelism is not supported yet; leave it at 1",
    ]


def test_variables_that_an_orchestrator_adds_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    resolve(Program.LOCAL, env={"DIPTYCH_ROUTER_SERVICE_HOST": "10.0.0.1", "PAGE_SIZE": "x"})
    assert "DIPTYCH_ROUTER_SERVICE_HOST" in caplog.text


def test_a_leaf_that_a_child_is_to_do_without_is_taken_out_of_its_environment() -> None:
    parent = resolve(Program.LOCAL, flags={"ssl_certfile": "c", "api_key": "k"}, env={})
    laid = environment_of(parent, Program.DECODE, without=("ssl_certfile", "ssl_keyfile"))
    assert (laid["DIPTYCH_SSL_CERTFILE"], laid["DIPTYCH_SSL_KEYFILE"]) == (None, None)
    assert laid["DIPTYCH_API_KEY"] == "k"


def test_a_child_resolves_the_same_from_its_environment() -> None:
    parent = resolve(
        Program.LOCAL,
        flags={
            "page_size": 16,
            "disable_radix_cache": True,
            "context_length": "none",
            "mem_fraction_static": 0.25,
        },
        file={"api_key": "s3", "context_length": 5, "max_total_tokens": 4096},
        env={"HOME": "/home/a", "DIPTYCH_PAGE_SIZE": "32", "DIPTYCH_CONTEXT_LENGTH": "7"},
    ).derive("share", cpu_threads=1)
    inherited = {"HOME": "/home/a", "DIPTYCH_PAGE_SIZE": "32", "DIPTYCH_CONTEXT_LENGTH": "7"}
    child = resolve(Program.DECODE, env={**inherited, **environment_of(parent, Program.DECODE)})
    assert child.values() == {name: getattr(parent, name) for name in child.values()}
    assert (child.page_size, child.context_length, child.cpu_threads) == (16, None, 1)
    router = resolve(
        Program.ROUTER, flags=WORKERS, env={**inherited, **environment_of(parent, Program.ROUTER)}
    )
    assert (router.api_key, router.policy) == ("s3", "cache_aware")


def test_repeatable_settings_survive_the_environment() -> None:
    record = resolve(
        Program.ROUTER,
        flags={
            "prefill": [["http://a:1"], ["http://b:1", "none"]],
            "decode": [["http://c:1"], ["http://d:1"]],
        },
        env={},
    )
    again = resolve(Program.ROUTER, env=environment_of(record, Program.ROUTER))
    assert again.values() == record.values()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"disaggregation_transfer_backend": "mooncake", "nixl_ucx_tls": "tcp"}, "--nixl-ucx-tls tcp"),
        ({"mooncake_protocol": "rdma"}, "--mooncake-protocol rdma"),
        (
            {"disaggregation_transfer_backend": "mooncake", "disaggregation_ib_device": "mlx5_0"},
            "--disaggregation-ib-device mlx5_0",
        ),
    ],
)
def test_a_setting_of_another_transfer_backend_is_refused(flags: dict[str, str], named: str) -> None:
    (problem,) = problems(**flags)
    assert problem.startswith(named)


def test_fault_rules_need_fault_injection() -> None:
    rules = '[{"where": "send", "action": "drop"}]'
    (problem,) = problems(fault_injection_rules=rules)
    assert "--enable-fault-injection" in problem
