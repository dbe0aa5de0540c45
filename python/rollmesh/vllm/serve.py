"""HTTP middleware that reports why a request failed. vLLM's servers answer a request with
finish_reason "error" by 500 "Internal server error" (in a stream: by an event) and drop the
stop_reason, in which the scheduler has put the reason (GenerateBaseServing._raise_if_error). The
platform sets the default of vLLM's --middleware option to

    rollmesh.vllm.serve.Reasons

For such an answer it asks the workers for the reason (collective_rpc) and replaces message and
status; all other answers are unchanged.

    400  the request's own fault; it can never be served as it is
    503  no step was possible: weights are missing, asleep or incomplete. The request may be served
         later
    500  anything else

With several data parallel ranks vLLM returns the reasons of the first rank's workers only; vLLM's
message stays for the others.
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
    """Wraps the server's send. The head of a 500 is held back until its body."""

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
        if "code" in words["error"]:  # OpenAI's form; /v1/messages has other types
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
        try:  # not vLLM's own timeout, which would leave unread replies behind
            words = await asyncio.wait_for(
                client.collective_rpc("why_failed", None, (known.request_id,)), WAIT_SECONDS
            )
        except Exception:  # noqa: BLE001 (the engine has ended or is busy: vLLM's message stays)
            return None
        return next((word for word in words if word is not None), None)


def _bare(text: bytes) -> dict[str, Any] | None:
    """The parsed answer, if it is vLLM's without a reason."""
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
    """By the exception class that the reason begins with."""
    name = why.partition(":")[0]
    kind = getattr(errors, name) if name in errors.__all__ else errors.Error
    if issubclass(kind, (errors.RequestError, errors.CapacityError)):
        return HTTPStatus.BAD_REQUEST, "BadRequestError"
    if issubclass(kind, ValueError):
        return HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
    return HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
