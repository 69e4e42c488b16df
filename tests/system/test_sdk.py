"""The official OpenAI SDK, sync and async, through the served gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from proxy.simulator import Simulator
from tests.system.harness import Gateway, Setup, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = [
    {"name": "rpm", "unit": "requests", "rate": "1000/min"},
    {"name": "tpm", "unit": "tokens", "rate": "1000000/min"},
    {"name": "turbo", "unit": "requests", "rate": "1/min", "models": ["gpt-4-turbo"]},
]
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, Simulator]]:
    folder: Path = tmp_path_factory.mktemp("sdk")
    async with running(folder, Setup(limits=LIMITS, workers=2, tenant_models=["gpt-*", "text-*"])) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: tuple[Gateway, Simulator]) -> AsyncIterator[openai.AsyncOpenAI]:
    gateway, _ = served
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.key, max_retries=0) as sdk:
        yield sdk


async def test_chat(client: openai.AsyncOpenAI) -> None:
    """A plain chat call is answered, with usage and our request id."""
    answer = await client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=5)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


async def test_sync_client(served: tuple[Gateway, Simulator]) -> None:
    """The sync client works like the async one: chat, stream, embeddings, responses, models."""
    gateway, _ = served

    def talk() -> None:
        with openai.OpenAI(base_url=gateway.base_url, api_key=gateway.key, max_retries=0) as sdk:
            assert sdk.chat.completions.create(model="gpt-4o", messages=HELLO).choices[0].message.content
            chunks = list(sdk.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert sdk.embeddings.create(model="text-embedding-3-small", input="x").data
            assert sdk.responses.create(model="gpt-4o", input="Hello").output_text
            assert [model.id for model in sdk.models.list()] == ["gpt-4o", "gpt-4-turbo", "text-embedding-3-small"]

    await asyncio.to_thread(talk)


async def test_stream_without_include_usage(client: openai.AsyncOpenAI) -> None:
    """A client that did not ask for usage gets no chunk without choices (D11)."""
    stream = await client.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True, max_tokens=4)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks)
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) == 4


async def test_stream_with_include_usage(client: openai.AsyncOpenAI) -> None:
    """A client that asked for usage gets exactly one chunk with it, without choices (D11)."""
    stream = await client.chat.completions.create(
        model="gpt-4o", messages=HELLO, stream=True, max_tokens=4, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(with_usage) == 1
    assert with_usage[0].choices == []
    assert with_usage[0].usage is not None
    assert with_usage[0].usage.completion_tokens == 4


async def test_embeddings(client: openai.AsyncOpenAI) -> None:
    """Embeddings arrive, in the base64 form that the SDK asks for by itself."""
    answer = await client.embeddings.create(model="text-embedding-3-small", input=["one", "two"])
    assert [row.index for row in answer.data] == [0, 1]
    assert all(isinstance(value, float) for value in answer.data[0].embedding)


async def test_responses(client: openai.AsyncOpenAI) -> None:
    """The Responses API works, plain and streamed to its terminal event."""
    answer = await client.responses.create(model="gpt-4o", input="Hello", max_output_tokens=20)
    assert answer.output_text
    stream = await client.responses.create(model="gpt-4o", input="Hello", stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


async def test_models(client: openai.AsyncOpenAI) -> None:
    """The model list shows what this tenant may use, and nothing else."""
    assert [model.id async for model in client.models.list()] == ["gpt-4o", "gpt-4-turbo", "text-embedding-3-small"]
    assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("fast")


async def test_wrong_key(served: tuple[Gateway, Simulator]) -> None:
    """A wrong key is a 401 in OpenAI's shape that does not repeat the key."""
    gateway, _ = served
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="sg-wrong-key", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError) as caught:
            await sdk.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.code == "invalid_api_key"
    assert "sg-wrong-key" not in str(caught.value)


@pytest.mark.parametrize("model", ["no-such-model", "fast"])
async def test_model_not_found(client: openai.AsyncOpenAI, model: str) -> None:
    """An unknown model and one that the tenant may not use are the same 404."""
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model=model, messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert f"The model `{model}` does not exist or you do not have access to it." in str(caught.value)


async def test_refused_limit(served: tuple[Gateway, Simulator], client: openai.AsyncOpenAI) -> None:
    """A refused limit raises RateLimitError with our text, retry-after and x-ratelimit headers; nothing reaches the upstream."""
    _, simulator = served
    await client.chat.completions.create(model="gpt-4-turbo", messages=HELLO)
    reached = len(simulator.log)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model="gpt-4-turbo", messages=HELLO)
    headers = caught.value.response.headers
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.type == "requests"
    assert "on limit turbo, requests per min (RPM): Limit 1, Used 1, Requested 1. Please try again in " in str(caught.value)
    assert 55 < int(headers["retry-after"]) <= 62
    assert int(headers["retry-after-ms"]) <= int(headers["retry-after"]) * 1000
    assert headers["x-ratelimit-limit-requests"] == "1"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-limit-tokens"] == "1000000"
    assert len(simulator.log) == reached


async def test_sdk_waits_as_told_and_succeeds(tmp_path: Path) -> None:
    """An SDK with its usual retries waits for retry-after-ms and gets its answer (A12)."""
    limits = [{"name": "rps", "unit": "requests", "rate": "1/s"}]
    async with running(tmp_path, Setup(limits=limits)) as (gateway, simulator):
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.key, max_retries=1) as sdk:
            for _ in range(3):
                await sdk.chat.completions.create(model="gpt-4o", messages=HELLO)
        assert len(simulator.log) == 3


async def _read(stream: Any) -> None:
    async for _ in stream:
        continue


async def test_upstream_error_in_stream_raises(served: tuple[Gateway, Simulator], client: openai.AsyncOpenAI) -> None:
    """An upstream that dies in the middle of a stream makes the SDK raise, instead of taking half for whole (D10)."""
    script = {"cut_after": 2}
    stream = await client.chat.completions.create(
        model="gpt-4o", messages=HELLO, stream=True, extra_headers={"x-sim-script": json.dumps(script)}
    )
    with pytest.raises(openai.APIError, match="closed the connection"):
        await _read(stream)


async def test_responses_stream_cut_raises(client: openai.AsyncOpenAI) -> None:
    """The same for the Responses API, whose errors have another form."""
    stream = await client.responses.create(
        model="gpt-4o", input="Hello", stream=True, extra_headers={"x-sim-script": json.dumps({"cut_after": 2})}
    )
    with pytest.raises(openai.APIError, match="closed the connection"):
        await _read(stream)
