"""Which paths pass, and how they are labelled."""

from __future__ import annotations

import pytest

from proxy.api.paths import LABELLED, OTHER_ENDPOINT, label_of, path_below_v1
from proxy.errors import Forbidden, InvalidRequest, NotFound


@pytest.mark.parametrize(
    ("raw", "path", "label"),
    [
        (b"/v1/chat/completions", "/chat/completions", "chat/completions"),
        (b"/v1/chat/completions/", "/chat/completions", "chat/completions"),
        (b"/v1/completions", "/completions", "completions"),
        (b"/v1/models/gpt-4", "/models/gpt-4", "models"),
        (b"/v1/models/meta-llama%2FLlama-3", "/models/meta-llama%2FLlama-3", "models"),
        (b"/v1/models/ft:gpt-4:org::id", "/models/ft:gpt-4:org::id", "models"),
        (b"/v1/responses/resp_1/input_items", "/responses/resp_1/input_items", "responses"),
        (b"/v1/embeddings", "/embeddings", "embeddings"),
        (b"/v1/audio/speech", "/audio/speech", "audio"),
        (b"/v1/chatter", "/chatter", OTHER_ENDPOINT),
        (b"/v1/chat", "/chat", OTHER_ENDPOINT),
        (b"/v1/completionsx", "/completionsx", OTHER_ENDPOINT),
        (b"/v1/v1/models", "/v1/models", OTHER_ENDPOINT),
        (b"/v1/my-projects", "/my-projects", OTHER_ENDPOINT),
        (b"/v1/a...b/~x", "/a...b/~x", OTHER_ENDPOINT),
    ],
)
def test_passed(raw, path, label):
    """Any plain path below /v1 passes with its encoding; a trailing slash is dropped, not redirected (D35, E01)."""
    assert path_below_v1(raw) == path
    assert label_of(path) == label
    assert label in {known.removeprefix("/") for known in LABELLED} | {OTHER_ENDPOINT}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"/",
        b"/v1",
        b"/v1/",
        b"/v1//",
        b"/v2/models",
        b"//v1/models",
        b"/x/v1/models",
        b"/V1/models",
        b"v1/models",
        b"http://h/v1/models",
        b"/metrics",
    ],
)
def test_not_found(raw):
    """A path that is not below /v1 is not found."""
    with pytest.raises(NotFound):
        path_below_v1(raw)


@pytest.mark.parametrize(
    "rest",
    [
        b"../admin",
        b"./models",
        b"models/..",
        b"models/../../admin",
        b"%2e%2e/admin",
        b"%2E./admin",
        b"%252e%252e/admin",
        b"%25252e%25252e/admin",
        b"models/%2e%2e%2fadmin",
        b"..%2fadmin",
        b"..%5cadmin",
        b"..\\admin",
        b"a//b",
        b"/models",
        b"a/%2f/b",
        b"models/\xc3\xa9",
        b"models/%c3%a9",
        b"models/%00",
        b"models/%0d%0aHost:%20x",
        b"models/x%3fy",
        b"models/x%23y",
        b"organization;x",
        b"organization%3fx",
        b"organization%23/users",
    ],
)
def test_not_plain(rest):
    """A path that could mean another one to the upstream than to us is refused, however often it is encoded."""
    with pytest.raises(InvalidRequest):
        path_below_v1(b"/v1/" + rest)


@pytest.mark.parametrize(
    "rest",
    [
        b"organization",
        b"organization/users",
        b"Organization/x",
        b"projects/1",
        b"%70rojects",
        b"organization%2Fusers",
        b"%256frganization/x",
    ],
)
def test_account_paths_are_forbidden(rest):
    """What manages the upstream's account is not passed on, in any spelling."""
    with pytest.raises(Forbidden):
        path_below_v1(b"/v1/" + rest)
