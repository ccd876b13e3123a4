"""What is asked of all workers, or answered for all: joint calls, information, load, metrics."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

JOINT = [
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_config"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
]


async def workers(make_worker, kit, prefills=1, decodes=1):
    made = [await make_worker(kit.answers()) for _ in range(prefills + decodes)]
    return made[:prefills], made[prefills:]


async def call(router, method, path, data=None):
    async with router.client.request(method, router.url + path, json=data) as response:
        return response.status, await response.json()


# ---- joint calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), JOINT)
async def test_every_worker_is_asked_as_the_router_was(make_worker, kit, method, path):
    (prefill,), (decode,) = await workers(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        status, answer = await call(router, method, path, {"rid": "r1"})
    assert (status, answer["success"]) == (200, True)
    assert [(w["url"], w["status"]) for w in answer["workers"]] == [(prefill.url, 200), (decode.url, 200)]
    for worker in (prefill, decode):
        assert (method, path, b'{"rid": "r1"}') in worker.other


async def test_what_decode_workers_counted_is_added_up(make_worker, kit):
    prefills, decodes = await workers(make_worker, kit, 1, 2)
    for worker, count in zip([*prefills, *decodes], (9, 1, 2), strict=True):
        worker.pages["/abort_request"] = {"aborted": count, "message": "gone"}
    async with kit.router(prefills, decodes) as router:
        _, answer = await call(router, "POST", "/abort_request", {"abort_all": True})
    assert (answer["aborted"], answer["message"]) == (3, "gone")


async def test_messages_that_differ_are_told_worker_by_worker(make_worker, kit):
    (prefill,), (decode,) = await workers(make_worker, kit)
    prefill.pages["/flush_cache"] = {"success": True, "message": "5 pages dropped"}
    decode.pages["/flush_cache"] = {"success": True, "message": "0 pages dropped"}
    async with kit.router([prefill], [decode]) as router:
        _, answer = await call(router, "POST", "/flush_cache")
    each = f"prefill worker {prefill.url}: 5 pages dropped; decode worker {decode.url}: 0 pages dropped"
    assert (answer["success"], answer["message"]) == (True, each)


async def test_a_recording_that_had_ended_by_itself_on_one_side_is_no_failure(make_worker, kit):
    (prefill,), (decode,) = await workers(make_worker, kit)

    async def had_ended(_):
        return web.json_response({"error": {"message": "no profile is being recorded"}}, status=409)

    prefill.pages["/stop_profile"], decode.pages["/stop_profile"] = had_ended, {"path": "/traces/d"}
    async with kit.router([prefill], [decode]) as router:
        status, answer = await call(router, "POST", "/stop_profile")
        assert (status, answer["success"], answer["path"]) == (200, True, "/traces/d")
        assert [w["status"] for w in answer["workers"]] == [409, 200]
        decode.pages["/stop_profile"] = had_ended
        status, answer = await call(router, "POST", "/stop_profile")
        assert (status, answer["success"]) == (409, False)


@pytest.mark.parametrize(
    ("decode_status", "status", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (500, 502, "service_unavailable"),
        (404, 404, "invalid_request_error"),
    ],
)
async def test_one_failure_is_an_error_in_openai_shape(make_worker, kit, decode_status, status, kind):
    (prefill,), (decode,) = await workers(make_worker, kit)

    async def fails(_):
        return web.json_response({"error": {"message": "2 requests are running"}}, status=decode_status)

    decode.pages["/flush_cache"] = fails
    async with kit.router([prefill], [decode]) as router:
        given, answer = await call(router, "POST", "/flush_cache")
    assert (given, answer["error"]["type"], answer["success"]) == (status, kind, False)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "2 requests are running" in answer["error"]["message"]
    assert [w["status"] for w in answer["workers"]] == [200, decode_status]


async def test_a_worker_that_is_gone_is_named_and_the_others_do_their_part(make_worker, kit):
    (prefill,), (decode,) = await workers(make_worker, kit)
    async with kit.router([prefill], [decode]) as router:
        await decode.stop()
        status, answer = await call(router, "POST", "/abort_request", {"rid": "r1"})
    assert status == 502
    assert f"decode worker {decode.url} no answer" in answer["error"]["message"]
    assert ("POST", "/abort_request", b'{"rid": "r1"}') in prefill.other


async def test_an_abort_reaches_a_worker_that_was_removed_and_still_runs_it(make_worker, kit):
    (prefill,), (decode,) = await workers(make_worker, kit)
    decode.script = kit.streams([kit.event(1)], then=kit.hangs)
    async with kit.router([prefill], [decode]) as router, router.post() as stream:
        assert await stream.content.readany() == kit.event(1)
        router.server.registry.remove(router.server.registry.by_url(decode.url), "test")
        _, answer = await call(router, "POST", "/abort_request", {"rid": "r1"})
    assert [w["url"] for w in answer["workers"]] == [prefill.url, decode.url]


async def test_without_workers_a_joint_call_did_nothing(kit):
    async with kit.router([], []) as router:
        status, answer = await call(router, "POST", "/flush_cache")
        assert (status, answer["success"]) == (503, False)


# ---- information and load -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_shows_router_and_workers(make_worker, kit, path):
    (prefill,), (decode,) = await workers(make_worker, kit)
    decode.pages["/server_info"] = {
        "disaggregation_mode": "decode",
        "model_path": "m",
        "version": "9.9",
        "context_length": 77,
        "record": {"page_size": 32, "api_key": "s3cret"},
        "internal": {"api_key": "s3cret"},
    }
    async with kit.router([prefill], [decode], "--policy", "random", "--api-key", "hidden-key") as router:
        headers = {"Authorization": "Bearer hidden-key"}
        async with router.get(path, headers=headers) as response:
            text = await response.text()
            info = await response.json()
    assert info["ready"] is True
    assert [(w["url"], w["healthy"]) for w in info["workers"]] == [(prefill.url, True), (decode.url, True)]
    assert info["config"]["bags"]["router"]["policy"] == "random"
    shown = {"model_path": "m", "version": "9.9", "context_length": 77, "page_size": 32}
    assert info["workers"][1]["server_info"] == shown
    assert info["context_length"] == 77  # as from a single worker
    assert info["version"] != "9.9"
    assert "s3cret" not in text
    assert "hidden-key" not in text


async def test_load_is_one_list_of_every_workers_entries(make_worker, kit):
    prefills, decodes = await workers(make_worker, kit, 1, 2)
    for number, worker in enumerate((*prefills, decodes[0])):
        worker.pages["/get_load"] = [
            {"dp_rank": 0, "num_reqs": number, "num_waiting_reqs": 0, "num_tokens": 5}
        ]
    async with kit.router(prefills, decodes) as router:
        await decodes[1].stop()
        status, loads = await call(router, "GET", "/get_load")
    assert status == 200
    assert [(e["worker"], e["role"], e["num_reqs"]) for e in loads] == [
        (prefills[0].url, "prefill", 0),
        (decodes[0].url, "decode", 1),
    ]


# ---- metrics ------------------------------------------------------------------------------------------

EXPOSITION = """# HELP diptych_x_total Things.
# TYPE diptych_x_total counter
diptych_x_total{kind="a \\"b\\" \\\\"} 3.0
diptych_x_total{kind="c"} 1.0
# HELP diptych_y_seconds Time.
# TYPE diptych_y_seconds histogram
diptych_y_seconds_bucket{le="1.0"} 2.0
diptych_y_seconds_bucket{le="+Inf"} 3.0
diptych_y_seconds_count 3.0
diptych_y_seconds_sum 7.5
# HELP diptych_z Now.
# TYPE diptych_z gauge
diptych_z{worker="mine"} 2.0
"""


async def exposition(router, path):
    started = time.monotonic()
    async with router.get(path) as response:
        assert response.status == 200
        text = await response.text()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [(s.name, tuple(sorted(s.labels.items()))) for f in families for s in f.samples]
    assert len(samples) == len(set(samples))
    for kind in ("HELP", "TYPE"):
        heads = [line.split()[2] for line in text.splitlines() if line.startswith(f"# {kind} ")]
        assert len(heads) == len(set(heads))
    return {family.name: family for family in families}, time.monotonic() - started


async def test_metrics_of_all_workers_come_labelled_in_one_valid_exposition(make_worker, kit):
    prefills, decodes = await workers(make_worker, kit, 1, 2)
    for worker in (*prefills, *decodes):
        worker.pages["/metrics"] = EXPOSITION
    async with kit.router(prefills, decodes) as router:
        families, _ = await exposition(router, "/metrics")
        assert "diptych_router_worker_healthy" in families
        engine, _ = await exposition(router, "/engine_metrics")
        assert set(engine) == {"diptych_x", "diptych_y_seconds", "diptych_z"}
    who = [("prefill", prefills[0].url), *(("decode", w.url) for w in decodes)]
    counted = {(s.labels["role"], s.labels["worker"]) for s in families["diptych_x"].samples}
    assert counted == set(who)
    assert {s.value for s in families["diptych_x"].samples if s.labels["kind"] == 'a "b" \\'} == {3.0}
    assert len(families["diptych_y_seconds"].samples) == 4 * 3
    assert {s.labels["exported_worker"] for s in families["diptych_z"].samples} == {"mine"}


async def test_a_worker_that_hangs_or_answers_nonsense_is_left_out_within_the_bound(make_worker, kit):
    prefills, decodes = await workers(make_worker, kit, 1, 2)

    async def hangs(_):
        await asyncio.Event().wait()

    prefills[0].pages["/metrics"] = hangs
    decodes[0].pages["/metrics"] = EXPOSITION
    decodes[1].pages["/metrics"] = "this is { no exposition\n"
    async with kit.router(prefills, decodes) as router:
        families, seconds = await exposition(router, "/metrics")
    assert seconds < 4
    assert {s.labels["worker"] for s in families["diptych_x"].samples} == {decodes[0].url}
