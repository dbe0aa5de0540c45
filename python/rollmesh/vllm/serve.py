"""HTTP middleware that reports why a request failed. If a request has finish_reason "error", vLLM's
servers return 500 "Internal server error" (in a stream: an event) and drop the stop_reason, which
contains the reason (GenerateBaseServing._raise_if_error). The platform sets the default of vLLM's
--middleware option to

    rollmesh.vllm.serve.Reasons

For such a response it reads the reason from the workers (collective_rpc) and replaces message and
status; all other responses are unchanged.

    400  the request is wrong and would fail again
    503  a step was not possible: weights are missing, asleep or incomplete. The request may succeed
         later
    500  anything else

With several data parallel ranks vLLM returns only the reasons of the first rank's workers; requests
of other ranks keep vLLM's message.
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
            scope.setdefault("state", {})  # vLLM stores the request's id there
            send = _Answer(scope, send)
        await self._app(scope, receive, send)


class _Answer:
    """Wraps the server's send. Delays the head of a 500 response until its body arrives."""

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
        if "code" in words["error"]:  # OpenAI's format; /v1/messages has other types
            words["error"] |= {"code": int(status), "type": kind}
        said = json.dumps(words, ensure_ascii=False).encode()
        if event:
            return EVENT + said + END
        if self._head is not None:
            others = [
                (name, value)
                for name, value in self._head.get("headers", ())
                if name.lower() != b"content-length"
            ]
            self._head = {
                **self._head,
                "status": status,
                "headers": [*others, (b"content-length", b"%d" % len(said))],
            }
        return said

    async def _why(self) -> str | None:
        known = self._scope["state"].get("request_metadata")
        client = getattr(self._scope["app"].state, "engine_client", None)
        if known is None or client is None:
            return None
        try:  # vLLM's own timeout is not used, since it would leave unread replies behind
            words = await asyncio.wait_for(
                client.collective_rpc("why_failed", None, (known.request_id,)), WAIT_SECONDS
            )
        except Exception:  # noqa: BLE001 (the engine has ended or is busy: vLLM's message stays)
            return None
        return next((word for word in words if word is not None), None)


def _bare(text: bytes) -> dict[str, Any] | None:
    """Returns the parsed response if it is vLLM's response without a reason, otherwise None."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    bare = (
        isinstance(said, dict)
        and isinstance(error := said.get("error"), dict)
        and error.get("message") == BARE
    )
    return said if bare else None


def _status(why: str) -> tuple[HTTPStatus, str]:
    """Returns the status and type for a reason, by the exception class at its beginning."""
    name = why.partition(":")[0]
    kind = getattr(errors, name) if name in errors.__all__ else errors.Error
    if issubclass(kind, (errors.RequestError, errors.CapacityError)):
        return HTTPStatus.BAD_REQUEST, "BadRequestError"
    if issubclass(kind, ValueError):
        return HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
    return HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
