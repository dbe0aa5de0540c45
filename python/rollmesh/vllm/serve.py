"""Says over HTTP why a request failed. A request that ends with finish_reason "error" is answered by vLLM's servers with 500 "Internal
server error", and its stop_reason, where the scheduler has put the reason, is dropped (GenerateBaseServing._raise_if_error; by then
a stream has begun and says the same in an event). vLLM takes middleware by its --middleware option, whose default the platform sets to

    rollmesh.vllm.serve.Reasons

which lets everything else pass as it is. For such an answer it asks the workers, with collective_rpc, what became of the request, and
puts their words in the place of vLLM's, with the status that fits:

    400  the request's own fault: it can never be served as it is
    503  no step could be made: weights that are missing, asleep or not whole. The same request may be served later
    500  anything else

With several data parallel ranks vLLM passes on what the workers of the first one say: of a request on another, vLLM's words stand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from rollmesh import errors

BARE = "Internal server error"
EVENT, END = b"data: ", b"\n\n"
WAIT_SECONDS = 30.0

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Reasons:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})  # vLLM leaves the request's name there
            send = _Answer(scope, send)
        await self._app(scope, receive, send)


class _Answer:
    """In front of the server's send. The head of a 500 waits for its body."""

    def __init__(self, scope: Message, send: Send):
        self._scope, self._send = scope, send
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 500:
            self._head = message
            return
        if message["type"] == "http.response.body" and BARE.encode() in message.get("body", b""):
            message["body"] = await self._explained(message["body"])
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)
        await self._send(message)

    async def _explained(self, body: bytes) -> bytes:
        event = body.startswith(EVENT) and body.endswith(END)
        words = _bare(body[len(EVENT) :] if event else body)
        if words is None or (why := await self._why()) is None:
            return body
        status, kind = _status(why)
        words["error"]["message"] = why
        if "code" in words["error"]:  # OpenAI's form; that of /v1/messages has types of its own
            words["error"] |= {"code": int(status), "type": kind}
        said = json.dumps(words, ensure_ascii=False).encode()
        if event:
            return EVENT + said + END
        if self._head is not None:
            others = [(name, value) for name, value in self._head.get("headers", ()) if name.lower() != b"content-length"]
            self._head = {**self._head, "status": status, "headers": [*others, (b"content-length", b"%d" % len(said))]}
        return said

    async def _why(self) -> str | None:
        known = self._scope["state"].get("request_metadata")
        client = getattr(self._scope["app"].state, "engine_client", None)
        if known is None or client is None:
            return None
        try:  # vLLM's own timeout would leave replies behind that nobody reads
            words = await asyncio.wait_for(client.collective_rpc("why_failed", None, (known.request_id,)), WAIT_SECONDS)
        except Exception:  # noqa: BLE001 (the engine is gone, or busy: what vLLM has said stands)
            return None
        return next((word for word in words if word is not None), None)


def _bare(text: bytes) -> dict[str, Any] | None:
    """The answer, if it is one without a reason."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    bare = isinstance(said, dict) and isinstance(error := said.get("error"), dict) and error.get("message") == BARE
    return said if bare else None


def _status(why: str) -> tuple[HTTPStatus, str]:
    """By the class of ours that stands in front."""
    name = why.partition(":")[0]
    kind = getattr(errors, name) if name in errors.__all__ else errors.Error
    if issubclass(kind, (errors.RequestError, errors.CapacityError)):
        return HTTPStatus.BAD_REQUEST, "BadRequestError"
    if issubclass(kind, ValueError):
        return HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
    return HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
