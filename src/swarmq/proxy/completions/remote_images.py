"""Images that a request names by an https URL, fetched here from public addresses: engines get the content, and fetch nothing.

The address is checked where a socket is made for it, after names are resolved, so that no name leads into the proxy's network, not even one
whose address changes between a check and its use.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import ssl
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver

from swarmq.proxy.http_errors import RefusedError

Json = dict[str, Any]

FETCH_S = 10.0
"""Seconds within which all images of a request must arrive."""
MEDIA_TYPE = re.compile(r"image/[\w.+-]+")
RESERVED = (IPv4Network("192.0.0.0/24"), IPv6Network("3fff::/20"))
"""Networks of protocols and documentation that older versions of Python take for public."""
GLOBAL_UNICAST, NAT64 = IPv6Network("2000::/3"), IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to a single host of the internet. An IPv6 address that stands for an IPv4 address is judged
    by the latter."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = IPv4Address(ip.packed[-4:]) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
        if inner is None:
            return ip.is_global and ip in GLOBAL_UNICAST and ip not in RESERVED[1]
        ip = inner
    return ip.is_global and not ip.is_multicast and ip not in RESERVED[0]


class RemoteImages:
    """Fetches the images of a proxy's requests."""

    def __init__(
        self,
        *,
        max_bytes: int,
        timeout_s: float = FETCH_S,
        is_allowed: Callable[[str], bool] = is_public,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`max_bytes`: size of all images of a request. `is_allowed`: whether to connect to an IP address. `tls`: None verifies
        certificates by those of the system."""
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._is_allowed = is_allowed
        self._resolver = resolver
        self._tls = tls

    async def inline(self, chat: Json) -> Json:
        """Return the chat with `data:` URLs in place of the https URLs of its images. Raises RefusedError."""
        urls = {url: f"messages[{at}]" for at, message in enumerate(chat["messages"]) for url in _list_remote(message)}
        if not urls:
            return chat
        fetched: dict[str, str] = {}
        left = self._max_bytes
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, ssl=self._tls or True, socket_factory=self._open_socket
        )
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            try:
                async with asyncio.timeout(self._timeout_s):
                    for url, where in urls.items():
                        media_type, content = await _fetch(session, url, where, left)
                        left -= len(content)
                        fetched[url] = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
            except TimeoutError as error:
                raise _refuse(where, url, f"did not arrive within {self._timeout_s:g} s") from error
        return {**chat, "messages": [_replace(message, fetched) for message in chat["messages"]]}

    def _open_socket(self, info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
        """Return a socket for a resolved address, which is then connected to that address."""
        family, kind, protocol, _, address = info
        if not self._is_allowed(address[0]):
            raise PrivateAddressError("not a public address")
        return socket.socket(family, kind, protocol)


class PrivateAddressError(OSError):
    """An address to which the proxy does not connect for an agent."""


async def _fetch(session: aiohttp.ClientSession, url: str, where: str, max_bytes: int) -> tuple[str, bytes]:
    """Return media type and content."""
    headers = {"accept": "image/*", "accept-encoding": "identity"}
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status in range(300, 400):
                raise _refuse(where, url, "is redirected: name the url to which it leads")
            if response.status != 200:
                raise _refuse(where, url, f"is answered with status {response.status}")
            if not MEDIA_TYPE.fullmatch(response.content_type):
                raise _refuse(
                    where, url, f"has the content type {response.content_type!r:.100}, which is not an image's"
                )
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > max_bytes:
                    raise _refuse(
                        where, url, "makes the request's images larger than a body may be (proxy.max_body_bytes)"
                    )
            return response.content_type, bytes(content)
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, PrivateAddressError):
            raise _refuse(
                where, url, "names a host without a public address: send the content itself, in base64"
            ) from error
        raise _refuse(where, url, "cannot be reached") from error
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: a name that cannot be encoded
        raise _refuse(where, url, f"cannot be fetched ({type(error).__name__})") from error


def _list_remote(message: Json) -> list[str]:
    return [url for part in _list_parts(message) if (url := _find_url(part)).lower().startswith("https:")]


def _replace(message: Json, fetched: dict[str, str]) -> Json:
    """Return the message with the contents of its images."""
    parts = [
        {**part, "image_url": {"url": fetched[url]}} if (url := _find_url(part)) in fetched else part
        for part in _list_parts(message)
    ]
    return {**message, "content": parts} if parts else message


def _list_parts(message: Json) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _find_url(part: Any) -> str:
    named = part.get("image_url") if isinstance(part, dict) else None
    url = named.get("url") if isinstance(named, dict) else named
    return url if isinstance(url, str) else ""


def _refuse(where: str, url: str, why: str) -> RefusedError:
    return RefusedError(f"{where}: the image {url!r:.100} {why}", code="invalid_image_url", param="messages")
