"""Forms and files pass as they come, within bounds, to a worker that serves their model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from service.edge_config import EdgeConfig
from service.errors import BadRequestError
from service.uploads import MODEL_BYTES_MAX, ModelField
from tests.service.live import until
from tests.service.raw_exchange import echo, in_front_of
from tests.service.raw_worker import Got, RawWorker, read_body, whole

PATH = "/v1/audio/transcriptions"
MEDIA = "multipart/form-data; boundary=b0"


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--b0\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


SOUND = b"RIFF\x00\r\n--b\r\n" * 20_000
FILE = part("file", SOUND, '; filename="model.wav"')
END = b"--b0--\r\n"
BEGUN = part("model", b"whisper") + FILE[:200]
"""A model is known when the next part has begun."""
REST = FILE[200:] + END


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + END


@pytest.mark.parametrize("order", ["model first", "file first"])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_form_arrives_byte_for_byte_where_its_model_is_served(
    order: str, announced: bool
) -> None:
    other, right = RawWorker(echo, models=["m"]), RawWorker(echo, models=["whisper"])
    async with in_front_of(other, right) as live:
        fields = [part("model", b"whisper"), FILE]
        body = form(*(fields if order == "model first" else reversed(fields)))

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 30_000):
                yield body[start : start + 30_000]

        for _ in range(3):
            response = await live.client.post(
                f"{live.url}{PATH}?x=1",
                content=body if announced else parts(),
                headers={"content-type": MEDIA},
            )
            assert (response.status_code, response.content) == (200, body)
        assert (len(other.got), len(right.got)) == (0, 3)
        assert {got.path for got in right.got} == {f"{PATH}?x=1"}
        assert all(got.values("content-type") == [MEDIA] for got in right.got)


async def test_an_alias_in_a_form_becomes_the_served_model() -> None:
    worker = RawWorker(echo, models=["openai/whisper-large"])
    edge = EdgeConfig(model_aliases={"whisper-1": "openai/whisper-large"})
    async with in_front_of(worker, edge=edge) as live:
        response = await live.client.post(
            f"{live.url}{PATH}",
            content=form(part("language", b"de"), part("model", b"whisper-1"), FILE),
            headers={"content-type": MEDIA},
        )
        expected = form(part("language", b"de"), part("model", b"openai/whisper-large"), FILE)
        assert response.content == expected


async def test_the_worker_has_the_beginning_before_the_client_has_sent_the_end() -> None:
    arrived = asyncio.Event()

    async def listen(request: Got) -> None:
        await request.reader.readexactly(10)
        arrived.set()
        while not (await request.reader.read(1 << 16)).endswith(b"0\r\n\r\n"):
            pass
        request.writer.write(whole(200, b"{}"))

    worker = RawWorker(listen, models=["whisper"], early=(PATH,))
    async with in_front_of(worker) as live:

        async def parts() -> AsyncIterator[bytes]:
            yield BEGUN
            await asyncio.wait_for(arrived.wait(), 20)
            yield REST

        response = await live.client.post(
            f"{live.url}{PATH}", content=parts(), headers={"content-type": MEDIA}
        )
        assert response.status_code == 200


async def test_a_worker_that_refuses_early_is_heard() -> None:
    async def refuse(request: Got) -> None:
        request.writer.write(whole(413, b'{"error":{"message":"too big"}}'))

    worker = RawWorker(refuse, models=["whisper"], early=(PATH,))
    async with in_front_of(worker) as live:

        async def parts() -> AsyncIterator[bytes]:
            yield BEGUN
            await until(lambda: bool(worker.got), within_s=20.0)
            yield REST

        response = await live.client.post(
            f"{live.url}{PATH}", content=parts(), headers={"content-type": MEDIA}
        )
        assert (response.status_code, response.json()["error"]["message"]) == (413, "too big")
        await until(lambda: not live.service.held, within_s=10.0)


async def test_a_client_that_leaves_in_the_middle_is_gone_at_the_worker() -> None:
    seen = asyncio.Event()

    async def listen(request: Got) -> None:
        await request.reader.readexactly(10)
        try:
            await read_body(request)
        except (asyncio.IncompleteReadError, ValueError):
            seen.set()

    worker = RawWorker(listen, models=["whisper"], early=(PATH,))
    async with in_front_of(worker) as live:
        port = int(live.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: {MEDIA}\r\ncontent-length: 99999"
        writer.write(head.encode() + b"\r\n\r\n" + BEGUN)
        await until(lambda: bool(worker.got), within_s=20.0)
        writer.close()
        await asyncio.wait_for(seen.wait(), 20)
        await until(lambda: not live.service.held, within_s=10.0)


async def test_a_form_that_grows_too_long_is_a_413() -> None:
    worker = RawWorker(echo, models=["whisper"])
    async with in_front_of(worker, edge=EdgeConfig(body_bytes_max=100_000)) as live:

        async def parts() -> AsyncIterator[bytes]:
            yield BEGUN
            for _ in range(20):
                yield b"x" * 10_000

        for content in (parts(), form(part("model", b"whisper"), FILE)):
            try:
                response = await live.client.post(
                    f"{live.url}{PATH}", content=content, headers={"content-type": MEDIA}
                )
            except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
                continue  # It may close before everything was sent.
            assert (response.status_code, response.json()["error"]["code"]) == (
                413,
                "body_too_large",
            )
        await until(lambda: not live.service.held, within_s=10.0)


async def test_other_media_pass_without_being_looked_at() -> None:
    worker = RawWorker(echo)
    async with in_front_of(worker) as live:
        for media in ("application/octet-stream", "text/plain"):
            response = await live.client.post(
                f"{live.url}/v1/blobs", content=SOUND, headers={"content-type": media}
            )
            assert response.content == SOUND


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_model_is_found_however_the_bytes_are_cut(size: int) -> None:
    body = form(part("prompt", b"model"), part("model", b"whi\r\nsper"), FILE)
    field = ModelField(MEDIA.encode())
    head = b""
    for start in range(0, len(body), size):
        head += body[start : start + size]
        if field.feed(body[start : start + size]):
            break
    assert field.value == b"whi\r\nsper"
    assert field.replaced(head, b"x") == head.replace(b"whi\r\nsper", b"x")


@pytest.mark.parametrize("media", [b"multipart/form-data", b"multipart/form-data; boundary="])
def test_a_form_without_a_boundary_is_a_400(media: bytes) -> None:
    with pytest.raises(BadRequestError, match="boundary"):
        ModelField(media)


def test_what_is_no_form_or_has_an_endless_model_is_a_400() -> None:
    with pytest.raises(BadRequestError):
        ModelField(MEDIA.encode()).feed(b"no form at all")
    with pytest.raises(BadRequestError, match="too long"):
        ModelField(MEDIA.encode()).feed(part("model", b"x" * (MODEL_BYTES_MAX + 1)))
