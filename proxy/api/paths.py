"""Which paths of ``/v1`` are passed on, and under which label they are counted. Pure: bytes in, words out.

Anything below ``/v1`` passes but what could mean another path to the upstream than to us, and what manages an account.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from proxy.errors import Forbidden, InvalidRequest, NotFound

LABELLED = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/responses",
    "/models",
    "/moderations",
    "/images",
    "/audio",
    "/files",
    "/batches",
    "/uploads",
    "/vector_stores",
    "/fine_tuning",
    "/realtime",
)
OTHER_ENDPOINT = "other"
_ACCOUNT_PATHS = ("organization", "projects")
_CREDENTIAL_PATHS = ("realtime/client_secrets", "realtime/sessions", "realtime/transcription_sessions", "chatkit/sessions")
_NOT_PLAIN = re.compile(rb"[\\?#;%\x00-\x1f\x7f-\xff]")  # in a decoded path: may end or change a segment for somebody else


def path_below_v1(raw_path: bytes) -> str:
    """``/v1/chat/completions/`` -> ``/chat/completions``, percent-encoding kept. Raises NotFound, Forbidden, InvalidRequest."""
    prefix, _, rest = raw_path.partition(b"/v1/")
    if prefix or not rest.strip(b"/"):
        raise NotFound("There is no such path: expected one below /v1, such as /v1/chat/completions.")
    # Twice, since the upstream may sit behind something that decodes once more than we do.
    decoded = unquote_to_bytes(unquote_to_bytes(rest))
    segments = decoded.rstrip(b"/").split(b"/")
    if _NOT_PLAIN.search(decoded) or any(segment in (b"", b".", b"..") for segment in segments):
        raise InvalidRequest("The path is not in its plain form: expected no empty or dot segments and no special characters.")
    if segments[0].decode("ascii").lower() in _ACCOUNT_PATHS:
        raise Forbidden(f"/v1/{segments[0].decode('ascii')} manages the upstream account and is not passed on.")
    if b"/".join(segments[:2]).decode("ascii").lower() in _CREDENTIAL_PATHS:
        raise Forbidden("This path hands out a credential that works past the gateway's limits, and is not passed on.")
    return "/" + rest.rstrip(b"/").decode("latin-1")


def label_of(path: str) -> str:
    """The ``endpoint`` label of a path below /v1: from a closed list, so that no caller can create a series."""
    for label in LABELLED:
        if path == label or path.startswith(label + "/"):
            return label.removeprefix("/")
    return OTHER_ENDPOINT
