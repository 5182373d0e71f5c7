"""The receiver's HTTP routes, and its process: `python -m swarmq.weights.receiver.server FD`, with a listening socket as FD.

    POST /weights              a `WeightFileManifest`; the answer is a `Progress`: the missing chunks, or the path of the complete file
    PUT  /weights/NAME/INDEX   an encoded chunk; `?base=NAME` of the base file if it is a difference

A learner sends the manifest again after a broken connection, to continue, and after the last chunk, to get the path. Every request
must carry the engine's secret.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from swarmq.engine.auth import SECRET_ENV, carries_secret
from swarmq.weights.format.chunks import CHUNK_BYTES, WeightFileManifest
from swarmq.weights.receiver.store import UploadRefusedError, WeightStore

MAX_BODY_BYTES = 2 * CHUNK_BYTES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(store: WeightStore, secret: str) -> web.Application:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not carries_secret(request.headers.get("authorization", "").encode(errors="replace"), secret):
            return web.Response(text=f"send the engine's secret (${SECRET_ENV})", status=401)
        try:
            return await handler(request)
        except UploadRefusedError as error:
            return web.Response(text=str(error), status=error.status)

    async def begin(request: web.Request) -> web.Response:
        try:
            manifest = msgspec.json.decode(await request.read(), type=WeightFileManifest)
        except msgspec.MsgspecError as error:
            raise UploadRefusedError(f"the manifest is not valid: {error}", status=400) from error
        progress = await asyncio.to_thread(store.begin, manifest)
        return web.Response(body=msgspec.json.encode(progress), content_type="application/json")

    async def write(request: web.Request) -> web.Response:
        name, index = request.match_info["name"], int(request.match_info["index"])
        await asyncio.to_thread(store.write, name, index, await request.read(), request.query.get("base"))
        return web.Response()

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/weights", begin)
    app.router.add_put(r"/weights/{name}/{index:\d{1,9}}", write)
    return app


def main() -> None:
    store = WeightStore()
    try:
        app = make_app(store, os.environ[SECRET_ENV])
        fd, *tls_files = sys.argv[1:]
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if tls_files else None
        if tls:
            tls.load_cert_chain(*tls_files)
        web.run_app(app, sock=socket.socket(fileno=int(fd)), ssl_context=tls, access_log=None, print=None)
    finally:
        store.close()


if __name__ == "__main__":
    main()
