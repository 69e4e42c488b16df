"""The way to an upstream: one request in; status, raw headers and a byte stream out. A narrow protocol, and aiohttp behind it.

Decides nothing: no redirects, no cookies, no decompression, no retry, no bound on line or header size. Foreign exceptions end
here: what leaves is an UpstreamFault.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import UpstreamDisconnected, UpstreamFault, UpstreamGarbled, UpstreamTimeout, UpstreamUnreachable
from proxy.forwarding.headers import RawHeaders
from proxy.upstreams.model import Upstream

CONNECT_WITHIN_S = 5.0
SILENT_FOR_S = 600.0  # between two reads; what the SDKs themselves wait
# uvicorn and Node close idle connections after 5 s: ours must go first, or a request meets a connection that is just closing.
KEEP_ALIVE_S = 4.0
MOST_HEADERS = 10_000
_NO_BOUND = 2**31 - 1


@dataclass(slots=True)
class UpstreamRequest:
    """What to send. ``url`` is complete and sent as it stands; framing headers are added by the transport.

    ``is_sent`` is set by the transport as soon as the upstream may have seen any of it.
    """

    upstream: Upstream
    method: str
    url: str
    headers: RawHeaders
    body: bytes | None
    is_sent: bool = False


class UpstreamResponse(Protocol):
    """An answer whose body may still be on its way. ``abort`` it unless it was read to its end."""

    status: int
    headers: RawHeaders

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamFault when it ends early."""
        ...

    def abort(self) -> None:
        """Close the connection unless the body was read to its end; harmless when repeated."""
        ...


class Transport(Protocol):
    """Sends requests."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send, and return when the headers have come. Raises UpstreamFault."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class _AiohttpResponse:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: RawHeaders = list(response.raw_headers)

    async def chunks(self) -> AsyncIterator[bytes]:
        with _faults("closed the connection in the middle of its answer"):
            async for chunk in self._response.content.iter_any():
                yield chunk

    def abort(self) -> None:
        self._response.close()


class AiohttpTransport:
    """Connections of this worker to all upstreams. To be made inside a running event loop.

    ``HTTPS_PROXY``, ``HTTP_PROXY`` and ``NO_PROXY`` are read once, here. aiohttp's own ``trust_env`` would look them up in a
    thread for every call, and would let a ``.netrc`` entry stand in for the upstream key.
    """

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_sent)
        self._proxies = {name: _proxy_for(upstream.base_url) for name, upstream in upstreams.items()}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            requote_redirect_url=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S, sock_read=SILENT_FOR_S),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            max_line_size=_NO_BOUND,
            max_field_size=_NO_BOUND,
            max_headers=MOST_HEADERS,
            trace_configs=[trace],
        )
        # aiohttp repeats idempotent requests by itself; here a repeat is a decision. It has no public switch for this
        # (a test holds a GET against a server that hangs up).
        self._session._retry_connection = False

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """See ``Transport``."""
        headers = CIMultiDict((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in request.headers)
        with _faults("closed the connection before it answered"):
            response = await self._session.request(
                request.method,
                URL(request.url, encoded=True),
                headers=headers,
                data=request.body,
                allow_redirects=False,
                proxy=self._proxies[request.upstream.name],
                trace_request_ctx=request,
            )
        return _AiohttpResponse(response)

    async def close(self) -> None:
        """See ``Transport``."""
        await self._session.close()


def _proxy_for(base_url: str) -> str | None:
    url = URL(base_url)
    if urllib.request.proxy_bypass(url.host or ""):
        return None
    return urllib.request.getproxies().get(url.scheme)


async def _note_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.is_sent = True


@contextmanager
def _faults(how_it_closed: str) -> Iterator[None]:
    """Turn aiohttp's exceptions into ours. The messages reach clients, so no address or cause goes into them."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError, ssl.SSLError) as error:
        raise UpstreamUnreachable("The upstream can't be reached. Please try again.") from error
    except TimeoutError as error:
        raise UpstreamTimeout("The upstream did not answer in time.") from error
    except aiohttp.ClientResponseError as error:
        raise UpstreamGarbled("The upstream's answer is not valid HTTP.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamDisconnected(f"The upstream {how_it_closed}.") from error
    except ValueError as error:  # what aiohttp raises for an address or a header that it can't send
        raise UpstreamFault("The request can't be passed on to the upstream.") from error
