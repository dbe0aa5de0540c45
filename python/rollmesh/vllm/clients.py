"""A trainer's calls of vLLM: the four calls of a weight update, and a pause around them if it is
necessary.

    vllm.LLM, vllm.AsyncLLM     their calls take request objects; AsyncLLM's are awaited
    a server's URL              its endpoints for trainers, which exist only with
                                VLLM_SERVER_DEV_MODE=1 and have no password: bind the server to
                                loopback or to a private network
    any other object            the four calls with plain dicts, as vLLM's own trainers make them;
                                the caller pauses

If experts span data parallel ranks, these ranks step together and also make an update together.
vLLM delivers a call to each rank separately, possibly while other ranks are in a step that needs
all ranks, which would be a deadlock. A pause prevents this, since paused ranks do not step.
"""

from __future__ import annotations

import http.client
import inspect
import json
import re
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

from rollmesh import errors
from rollmesh.errors import ConfigError, Error, SyncAbortedError
from rollmesh.runtime.messages import reason, shown

CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
OURS = re.compile(rf"\b({'|'.join(errors.__all__)}): ")


def client_of(client: Any, timeout: float) -> Any:
    """Returns an object with the four calls and `spans` (whether an update needs a pause). Unless
    the client has only the four calls, the object also has serving(), which returns the versions
    that the workers serve; hold(), which returns whether it had to pause; and release()."""
    if isinstance(client, str):
        return _Server(client, timeout)
    if lacking := [name for name in CALLS if not callable(getattr(client, name, None))]:
        raise ConfigError(
            f"client: expected vLLM's LLM or its four calls, got a {type(client).__name__} "
            f"without {', '.join(lacking)}"
        )
    if "request" not in inspect.signature(client.init_weight_transfer_engine).parameters:
        return SimpleNamespace(spans=False, **{call: getattr(client, call) for call in CALLS})
    return _Offline(client) if hasattr(client, "llm_engine") else _Awaited(client)


def is_awaited(client: Any) -> bool:
    return inspect.iscoroutinefunction(client.start_weight_update)


class _Requests:
    """Calls that take request objects. They return vLLM's results, which may be awaitable."""

    def __init__(self, engine: Any, config: Any):
        self.start_weight_update = engine.start_weight_update
        self.finish_weight_update = engine.finish_weight_update
        self._engine = engine
        self.spans = config.parallel_config.data_parallel_size > 1

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        return self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    def update_weights(self, update_info: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        return self._engine.update_weights(WeightTransferUpdateRequest(update_info))

    def serving(self) -> Any:
        return self._engine.collective_rpc("weight_version")


class _Offline(_Requests):
    """vllm.LLM; with several data parallel ranks there is one for each rank."""

    def __init__(self, llm: Any):
        super().__init__(llm, llm.llm_engine.vllm_config)

    def hold(self) -> bool:
        if self._engine.llm_engine.is_sleeping():  # also true while paused
            return False
        self._engine.sleep(0, "keep")
        return True

    def release(self) -> None:
        self._engine.wake_up(["scheduling"])


class _Awaited(_Requests):
    """vllm.AsyncLLM."""

    def __init__(self, llm: Any):
        super().__init__(llm, llm.vllm_config)

    async def hold(self) -> bool:
        if await self._engine.is_paused():
            return False
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        return True

    async def release(self) -> None:
        await self._engine.resume_generation()


class _Server:
    """A vLLM server. `spans` is True, since the number of data parallel ranks is not known here."""

    spans = True

    def __init__(self, url: str, timeout: float):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "client: expected the URL of a vLLM server, such as http://127.0.0.1:8000, got "
                f"{shown(url)}"
            )
        self._url, self._timeout = url.rstrip("/"), timeout
        # An empty ProxyHandler ignores http_proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._ask("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._ask("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update", {"weight_version": weight_version})

    def serving(self) -> Any:
        return json.loads(self._ask("collective_rpc", {"method": "weight_version"}))["results"]

    def hold(self) -> bool:
        if json.loads(self._ask("is_paused"))["is_paused"]:
            return False
        self._ask("pause?mode=keep&clear_cache=false", {})
        return True

    def release(self) -> None:
        self._ask("resume", {})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self._url}/{path}", None if body is None else json.dumps(body).encode(), headers
        )
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            hint = "; start the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
            raise SyncAbortedError(
                f"{self._url}/{path}: {error.code} "
                f"{error.read()[:4000].decode(errors='replace')}{hint}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise SyncAbortedError(f"{self._url}/{path}: {reason(error)}") from error


def typed(error: BaseException) -> BaseException:
    """Converts an exception of vLLM, which contains the text of a worker's error. If the text names
    classes of rollmesh, returns an exception of the last one, which is the original error;
    otherwise returns the exception itself."""
    names = OURS.findall(str(error)) if isinstance(error, Exception) else []
    if not names or (isinstance(error, Error) and type(error) is not SyncAbortedError):
        return error
    known: Error = getattr(errors, names[-1])(str(error))
    known.__cause__ = error
    return known
