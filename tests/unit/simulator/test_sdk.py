"""The real OpenAI SDK against the simulator. What the SDK does not look at is left to the other tests."""

from __future__ import annotations

import asyncio
import socket

import openai
import pytest

from proxy.simulator import Script, serve

MESSAGES = [{"role": "user", "content": "Hello?"}]


@pytest.fixture
async def sdk(running, key):
    async with openai.AsyncOpenAI(api_key=key, base_url=running.base_url, max_retries=0) as sdk:
        yield sdk


async def test_chat(sdk):
    """A chat completion is parsed with its usage."""
    answer = await sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES, max_tokens=4)
    assert len(answer.choices[0].message.content.split()) == 4
    assert answer.usage.total_tokens == 6
    assert answer._request_id.startswith("req_")


async def test_chat_stream(sdk):
    """A stream is parsed to the end, with usage in its last chunk."""
    stream = await sdk.chat.completions.create(
        model="gpt-4o", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]).count(" ") == 15
    assert chunks[-1].usage.completion_tokens == 16


async def test_legacy_completions(sdk):
    """A legacy completion is parsed, whole and as a stream."""
    answer = await sdk.completions.create(model="gpt-3.5-turbo-instruct", prompt="Hello")
    stream = await sdk.completions.create(model="gpt-3.5-turbo-instruct", prompt="Hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text


async def test_embeddings(sdk):
    """Embeddings are decoded from base64, which the SDK asks for by itself, to the floats of the other encoding."""
    packed = await sdk.embeddings.create(model="text-embedding-3-small", input=["a", "b"], dimensions=64)
    listed = await sdk.embeddings.create(model="text-embedding-3-small", input=["a", "b"], dimensions=64, encoding_format="float")
    assert packed.data[1].embedding == listed.data[1].embedding
    assert len(packed.data[0].embedding) == 64


async def test_responses(sdk):
    """A response is parsed, whole and as a stream of typed events."""
    answer = await sdk.responses.create(model="gpt-4o", input="Hello")
    stream = await sdk.responses.create(model="gpt-4o", input="Hello", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == answer.output_text
    assert events[-1].response.usage.output_tokens == 16


async def test_response_stream_accumulates(sdk):
    """The SDK's own accumulator accepts the order and content of the events."""
    async with sdk.responses.stream(model="gpt-4o", input="Hello") as stream:
        final = await stream.get_final_response()
    assert len(final.output_text.split()) == 16


async def test_models_and_moderations(sdk):
    """Models are listed and found, and moderations parsed."""
    assert (await sdk.models.list()).data[0].object == "model"
    assert (await sdk.models.retrieve("gpt-4o")).id == "gpt-4o"
    assert (await sdk.moderations.create(input="Hello")).results[0].flagged is False


async def test_errors_are_raised_as_their_own_kind(sdk, simulator, key):
    """The SDK raises its own exception for each error, with code and type."""
    kinds = {
        401: openai.AuthenticationError,
        404: openai.NotFoundError,
        429: openai.RateLimitError,
        500: openai.InternalServerError,
    }
    for status, kind in kinds.items():
        simulator.script_key(key, Script(status=status), times=1)
        with pytest.raises(kind):
            await sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES)


async def test_error_in_a_stream_is_raised(sdk, simulator):
    """An error that breaks into a stream is raised after the tokens before it."""
    simulator.script_key(None, Script(error_in_stream=2, error_code="server_is_overloaded"))
    stream = await sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES, stream=True)
    tokens = []
    with pytest.raises(openai.APIError) as raised:
        tokens.extend([chunk.choices[0].delta.content async for chunk in stream])
    assert raised.value.code == "server_is_overloaded"


async def test_retry_succeeds_after_a_rate_limit(simulator, running, key):
    """The SDK waits as told and tries again, and the log shows both requests."""
    simulator.script_key(key, Script(status=429, retry_after_s=0.001), times=1)
    async with openai.AsyncOpenAI(api_key=key, base_url=running.base_url, max_retries=1) as sdk:
        await sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert [seen.answered_status for seen in simulator.log] == [429, 200]
    assert dict(simulator.log[1].headers)[b"x-stainless-retry-count"] == b"1"


async def test_synchronous_sdk_on_a_given_socket(simulator, key):
    """The synchronous SDK works against a socket that the caller has bound."""
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    serving = asyncio.create_task(serve(simulator, sock))

    def ask():
        with openai.OpenAI(api_key=key, base_url=url, max_retries=0) as sdk:
            return [chunk.id for chunk in sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES, stream=True)]

    assert len(set(await asyncio.to_thread(ask))) == 1
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
