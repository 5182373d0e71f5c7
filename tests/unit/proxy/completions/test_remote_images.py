"""Images by URL are fetched from public addresses alone, whole or not at all. 127.0.0.1 stands for a public address, 127.0.0.2 for a private one."""

import asyncio
import base64
import socket
import ssl
from functools import partial

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver

from support.tls import self_signed
from swarmq.proxy.completions.remote_images import RemoteImages, is_public
from swarmq.proxy.http_errors import RefusedError

PIXELS = b"\x89PNG pixels"
DATA = f"data:image/png;base64,{base64.b64encode(PIXELS).decode()}"
PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"


class Names(AbstractResolver):
    """Every name has the first of these lists of addresses, then the next."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def resolve(self, host, port=0, family=socket.AF_INET):
        fields = {"hostname": host, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
        return [{**fields, "host": address} for address in self.answers.pop(0)]

    async def close(self):
        pass


class Site:
    """A server of images at all addresses of this host."""

    def __init__(self, folder):
        self.folder, self.asked, self.over = self_signed(folder), [], asyncio.Event()

    async def answer(self, request):
        self.asked.append(request.path)
        match request.path:
            case "/cat.png":
                return web.Response(body=PIXELS, content_type="image/png")
            case "/page":
                return web.Response(text="hello")
            case "/moved":
                raise web.HTTPFound("/cat.png")
            case "/endless":
                response = web.StreamResponse(headers={"content-type": "image/png"})
                await response.prepare(request)
                await self.over.wait()
                return response
        raise web.HTTPNotFound

    async def __aenter__(self):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self.folder / "cert.pem", self.folder / "key.pem")
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "0.0.0.0", 0, ssl_context=tls).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_):
        self.over.set()
        await self.runner.cleanup()

    @property
    def images(self):
        """What fetches from here; other arguments can be given."""
        trusted = ssl.create_default_context(cafile=str(self.folder / "cert.pem"))
        trusted.check_hostname = False
        return partial(RemoteImages, max_bytes=100, is_allowed=lambda address: address == PUBLIC, tls=trusted)


@pytest.fixture
async def site(tmp_path):
    async with Site(tmp_path) as made:
        yield made


def ask(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]}


async def test_the_engine_gets_the_content(site):
    url = f"https://{PUBLIC}:{site.port}/cat.png"
    assert await site.images().inline(ask(url, DATA, url)) == ask(DATA, DATA, DATA)
    assert site.asked == ["/cat.png"], "once, however often it is named"


async def test_a_request_without_them_stays_as_it_is():
    chat = ask(DATA)
    assert await RemoteImages(max_bytes=1).inline(chat) is chat


async def test_a_private_address_is_never_reached(site):
    for host, names in ((PRIVATE, Names()), ("inside.example", Names([PRIVATE]))):
        with pytest.raises(RefusedError, match=r"^messages\[1\]: the image .* names a host without a public address"):
            await site.images(resolver=names).inline(ask(f"https://{host}:{site.port}/cat.png"))
    assert site.asked == []


async def test_of_a_name_with_both_only_the_public_address_is_reached(site):
    names = Names([PRIVATE, PUBLIC])
    url = f"https://both.example:{site.port}/cat.png"
    assert await site.images(resolver=names).inline(ask(url)) == ask(DATA)


async def test_a_name_that_changes_its_address_is_checked_again(site):
    images = site.images(resolver=Names([PUBLIC], [PRIVATE]))
    url = f"https://rebound.example:{site.port}/cat.png"
    assert await images.inline(ask(url)) == ask(DATA)
    with pytest.raises(RefusedError, match="without a public address"):
        await images.inline(ask(url))
    assert site.asked == ["/cat.png"]


@pytest.mark.parametrize(
    ("path", "limits", "why"),
    [
        ("/gone", {}, "is answered with status 404"),
        ("/moved", {}, "is redirected: name the url to which it leads"),
        ("/page", {}, "has the content type 'text/plain'"),
        ("/cat.png", {"max_bytes": 5}, r"larger than a body may be \(proxy.max_body_bytes\)"),
        ("/endless", {"timeout_s": 0.2}, "did not arrive within 0.2 s"),
    ],
)
async def test_anything_but_an_image_is_refused(site, path, limits, why):
    with pytest.raises(RefusedError, match=why) as refused:
        await site.images(**limits).inline(ask(f"https://{PUBLIC}:{site.port}{path}"))
    assert (refused.value.code, refused.value.param) == ("invalid_image_url", "messages")


async def test_images_share_the_limit_of_a_request(site):
    urls = [f"https://{PUBLIC}:{site.port}/cat.png{query}" for query in ("", "?again")]
    with pytest.raises(RefusedError, match=r"again' makes the request's images larger"):
        await site.images(max_bytes=2 * len(PIXELS) - 1).inline(ask(*urls))


@pytest.mark.parametrize("url", [f"https://{'a' * 70}.example/", "https://[::1/", "https://", "https://127.1/"])
async def test_a_url_that_names_no_host_is_refused(url):
    with pytest.raises(RefusedError, match="cannot be"):
        await RemoteImages(max_bytes=1).inline(ask(url))


INSIDE = (
    "10.0.0.1 127.0.0.1 169.254.169.254 192.168.1.1 172.16.0.1 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 192.0.0.192 "
    "::1 :: fe80::1%eth0 fc00::1 fec0::1 ff02::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:a00:1:: ::10.0.0.1 3fff::1"
)


@pytest.mark.parametrize("address", INSIDE.split())
def test_an_address_inside_a_network_is_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_an_address_of_the_internet_is_public(address):
    assert is_public(address)
