"""Embeddings, scores, rankings, token ids and transcriptions of the mock worker, as vLLM's."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.mock.light_bodies import text_of, token_ids
from service.mock.light_routes import AUDIO_BYTES_PER_S
from service.mock.protocol import text_tokens
from tests.mock.mock_client import events_of, in_process, over_http
from tests.service.live import until

SOUND = b"\x01\x02" * AUDIO_BYTES_PER_S


async def test_a_client_library_gets_embeddings_in_both_encodings() -> None:
    async with over_http() as (client, _):
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        async with sdk:
            # The library asks for base64 and decodes it.
            answer = await sdk.embeddings.create(model="mock", input=["one", "two words", "one"])
        first, second, again = (each.embedding for each in answer.data)
        assert first == again != second
        assert sum(number * number for number in first) == pytest.approx(1.0, abs=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 1 + 3 + 1
        body = {"input": "one", "encoding_format": "float", "dimensions": 8}
        plain = (await client.post("/v1/embeddings", json=body)).json()
        assert plain["data"][0]["embedding"] == pytest.approx(first, abs=1e-6)
        assert plain["id"].startswith("embd-")


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("some text", [3]), ([5, 6], [2]), ([[1], [2, 3]], [1, 2]), (["a", "bcdef"], [1, 2])],
)
async def test_every_form_of_an_input_is_counted(prompt: Any, tokens: list[int]) -> None:
    async with in_process() as (client, _):
        for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "pooling")):
            answer = (await client.post(path, json={"model": "mock", "input": prompt})).json()
            assert [each["index"] for each in answer["data"]] == list(range(len(tokens)))
            assert {each["object"] for each in answer["data"]} == {name}
            assert answer["usage"]["prompt_tokens"] == sum(tokens)
            assert answer["usage"]["completion_tokens"] == 0


async def test_pooled_vectors_are_the_same_in_base64() -> None:
    async with in_process() as (client, _):
        body = {"input": "one"}
        plain = (await client.post("/pooling", json=body)).json()["data"][0]["data"]
        coded = await client.post("/pooling", json=body | {"encoding_format": "base64"})
        data = base64.b64decode(coded.json()["data"][0]["data"])
        assert struct.unpack(f"<{len(plain)}f", data) == pytest.approx(plain, abs=1e-6)


async def test_classes_have_shares_that_add_up_and_the_largest_names_the_label() -> None:
    async with in_process() as (client, _):
        texts = [f"text {number}" for number in range(8)]
        answer = (await client.post("/classify", json={"input": texts})).json()
        for each in answer["data"]:
            assert sum(each["probs"]) == pytest.approx(1.0)
            best = each["probs"].index(max(each["probs"]))
            assert (each["label"], each["num_classes"]) == (f"LABEL_{best}", 2)
        assert {each["label"] for each in answer["data"]} == {"LABEL_0", "LABEL_1"}


@pytest.mark.parametrize(
    "names",
    [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")],
)
async def test_pairs_are_scored_under_each_of_their_names(names: tuple[str, str]) -> None:
    async with in_process() as (client, _):
        one, other = names
        body = {one: "red fox", other: ["red fox", "blue fox", "nothing of it"]}
        for path in ("/score", "/v1/score"):
            answer = (await client.post(path, json=body)).json()
            same, near, far = (each["score"] for each in answer["data"])
            assert same == 1.0 > near > far == 0.0
        lists = {one: ["a", "b"], other: ["a", "c"]}
        scores = (await client.post("/score", json=lists)).json()["data"]
        assert [each["score"] for each in scores] == [1.0, 0.0]


async def test_documents_are_ranked_and_cut() -> None:
    async with in_process() as (client, _):
        documents = ["nothing of it", "blue fox", "red fox"]
        body = {"query": "red fox", "documents": documents}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = (await client.post(path, json=body)).json()
            assert [each["index"] for each in answer["results"]] == [2, 1, 0]
            assert answer["results"][0]["document"] == {"text": "red fox", "multi_modal": None}
            scores = [each["relevance_score"] for each in answer["results"]]
            assert scores == sorted(scores, reverse=True)
            assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
        cut = (await client.post("/rerank", json=body | {"top_n": 1})).json()
        assert [each["index"] for each in cut["results"]] == [2]


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_ids_are_as_many_as_tokens_are_counted_and_become_the_text_again(text: str) -> None:
    ids = token_ids(text)
    assert len(ids) == text_tokens(text.encode())
    assert text_of(ids) == text


async def test_token_ids_count_what_generation_counts() -> None:
    async with in_process(context_tokens=2048) as (client, _):
        answer = (await client.post("/tokenize", json={"prompt": "hello world"})).json()
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2048)
        assert answer["token_strs"] is None
        back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "hello world"}
        named = {"prompt": "hello world", "return_token_strs": True}
        strings = (await client.post("/tokenize", json=named)).json()["token_strs"]
        assert "".join(strings) == "hello world"
        chat = {
            "messages": [
                {"role": "system", "content": None},
                {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},
            ]
        }
        counted = (await client.post("/tokenize", json=chat)).json()["count"]
        body = chat | {"max_tokens": 1, "ignore_eos": True}
        generated = (await client.post("/v1/chat/completions", json=body)).json()
        assert counted == generated["usage"]["prompt_tokens"]


@pytest.mark.parametrize("route", ["transcriptions", "translations"])
async def test_a_sound_becomes_words_whole_and_streamed(route: str) -> None:
    async with over_http() as (client, _):
        path, files = f"/v1/audio/{route}", {"file": ("a.wav", SOUND)}
        whole = (await client.post(path, files=files, data={"model": "mock"})).json()
        assert whole["usage"] == {"type": "duration", "seconds": 2}
        assert len(whole["text"].split()) == 4
        streamed = await client.post(path, files=files, data={"model": "mock", "stream": "true"})
        events = events_of(streamed.content)
        said = "".join(each["choices"][0]["delta"]["content"] for each in events)
        assert said.split() == whole["text"].split()
        assert {each["object"] for each in events} == {"transcription.chunk"}
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "another model": ("/v1/embeddings", {"model": "x", "input": "a"}, 404, "NotFoundError"),
    "no input": ("/v1/embeddings", {}, 400, "Bad Request"),
    "an empty input": ("/v1/embeddings", {"input": []}, 400, "BadRequestError"),
    "too many dimensions": ("/v1/embeddings", {"input": "a", "dimensions": 9}, 400, "BadRequest"),
    "a long input": ("/pooling", {"input": [1] * 101}, 400, "BadRequestError"),
    "one side": ("/score", {"queries": "a", "text_2": "b"}, 400, "Bad Request"),
    "2 to 3": ("/score", {"queries": ["a"] * 2, "documents": ["b"] * 3}, 400, "BadRequestError"),
    "no documents": ("/rerank", {"query": "a", "documents": []}, 400, "BadRequestError"),
    "a negative top_n": ("/rerank", {"query": "a", "documents": "b", "top_n": -1}, 400, "Bad"),
    "nothing to count": ("/tokenize", {"model": "mock"}, 400, "Bad Request"),
    "a negative id": ("/detokenize", {"tokens": [-1]}, 400, "Bad Request"),
}


@pytest.mark.parametrize(("path", "body", "status", "kind"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_vllm_refuses_is_refused(path: str, body: Any, status: int, kind: str) -> None:
    async with in_process(context_tokens=100) as (client, _):
        answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == status
        assert error["type"].startswith(kind)
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_forms_without_a_sound_or_damaged_are_refused() -> None:
    async with in_process() as (client, _):
        path, file = "/v1/audio/transcriptions", {"file": ("a.wav", b"x")}
        answers = [
            await client.post(path, data={"model": "mock"}),
            await client.post(path, files={"model": (None, "mock")}),
            await client.post(path, files=file, data={"response_format": "srt"}),
            await client.post(
                path,
                content=b"--b\r\nnothing",
                headers={"content-type": "multipart/form-data"},
            ),
        ]
        assert [answer.status_code for answer in answers] == [400] * 4
        other = await client.post(path, files=file, data={"model": "other"})
        assert other.status_code == 404


async def test_a_hung_engine_answers_when_it_goes_on_and_a_dead_one_never() -> None:
    async with over_http() as (client, server):
        server.engine.pause()
        body = {"input": "a"}
        waiting = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await until(lambda: server.load == 1, within_s=20)
        leaving = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await until(lambda: server.load == 2, within_s=20)
        leaving.cancel()
        await until(lambda: server.load == 1, within_s=20)
        assert not waiting.done()
        server.engine.resume()
        assert (await waiting).status_code == 200
        server.engine.stop()
        await until(lambda: not server.engine.alive, within_s=20)
        assert (await client.post("/v1/embeddings", json=body)).status_code == 500
        assert server.load == 0
