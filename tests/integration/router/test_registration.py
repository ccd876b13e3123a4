"""A worker's own side of its registration, at routers that refuse, hang or aren't there."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from diptych.launch import registration
from diptych.launch.registration import Announcement, Registration


def announced(worker, lease=1.0):
    return Announcement(url=worker.url, role="decode", bootstrap_port=None, instance_id="one", lease=lease)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def test_registering_renewing_and_leaving(make_worker, kit, session):
    prefill, decode = await make_worker(kit.answers()), await make_worker(kit.answers())
    async with kit.router([prefill], []) as router:
        mine = Registration(router.url, announced(decode), session)
        registry = router.server.registry
        await kit.eventually(lambda: registry.has_pair)
        await asyncio.sleep(1.2)  # beyond the first lease
        assert registry.has_pair
        await mine.leave()
        assert registry.by_url(decode.url) is None
        await asyncio.sleep(0.5)
        assert registry.by_url(decode.url) is None  # and no renewal brought it back


async def test_a_worker_that_takes_over_the_address_is_not_thrown_out_by_the_one_before(
    make_worker, kit, session, caplog
):
    decode = await make_worker(kit.answers())
    async with kit.router([], []) as router:
        registry = router.server.registry
        old = Registration(router.url, announced(decode), session)
        await kit.eventually(lambda: registry.by_url(decode.url) is not None)
        await old.stop()
        successor = Announcement(
            url=decode.url, role="decode", bootstrap_port=None, instance_id="two", lease=60.0
        )
        new = Registration(router.url, successor, session)
        await kit.eventually(lambda: registry.by_url(decode.url).instance_id == "two")
        await old.leave()
        assert registry.by_url(decode.url).instance_id == "two"
        await new.leave()
    assert "another process now" in caplog.text


@pytest.mark.parametrize("trouble", ["refuses", "is not there", "hangs"])
async def test_trouble_is_logged_once_and_tried_again_with_growing_patience(
    make_worker, kit, session, caplog, monkeypatch, trouble
):
    decode, router = await make_worker(kit.answers()), await make_worker(kit.answers())
    monkeypatch.setattr(registration, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(registration, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(registration, "GOODBYE_SECONDS", 0.05)
    came = []

    async def page(request):
        came.append(request)
        if trouble == "hangs":
            await asyncio.Event().wait()
        return aiohttp.web.json_response({"error": "no"}, status=403)

    router.pages["/workers"] = page
    url = router.url
    if trouble == "is not there":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with kit.router([], []):  # for its settings
        mine = Registration(url, announced(decode), session)
        await asyncio.sleep(0.6)
        await mine.leave()
    warnings = [r for r in caplog.records if "can't register at the router" in r.message]
    assert len(warnings) == 1
    if trouble != "is not there":
        assert 2 <= len(came) <= 7
