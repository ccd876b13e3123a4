"""`POST /update_weights_from_disk`, while the scheduler has not answered yet."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from .conftest import MODEL, Client, eventually, say


async def test_while_weights_load_requests_are_put_off_and_the_worker_is_well(client: Client):
    """The scripted scheduler never answers. A router that took the worker for ill would turn clients away for
    some time after the update."""
    updating = asyncio.create_task(client.post("/update_weights_from_disk", {"model_path": MODEL}))

    async def held() -> bool:
        return (await client.post("/generate", {"text": say("a")}))[0] == 503

    await eventually(held)
    async with client.session.get(client.url + "/health") as response:
        assert response.status == 200
    status, error = await client.post("/update_weights_from_disk", {"model_path": MODEL})
    assert (status, error["error"]["message"]) == (503, "the weights are being replaced")
    updating.cancel()
    with suppress(asyncio.CancelledError):
        await updating

    async def taken() -> bool:
        return (await client.post("/generate", {"text": say("a")}))[0] == 200

    await eventually(taken)
