"""How a trainer reaches vLLM: the four calls of a weight update, and a pause round them where it has to be.

    vllm.LLM, vllm.AsyncLLM     their calls take requests, AsyncLLM's are awaited
    a server's URL              its endpoints for trainers, which it has only under VLLM_SERVER_DEV_MODE=1 and which ask for no password:
                                keep it to loopback or a network of your own
    any other object            the four calls with plain dicts, as vLLM's own trainers make them; pausing is the caller's

Data parallel ranks whose experts span them step together, and their workers take an update together. vLLM hands the calls to each rank at
a moment of its own, also while others are within a wave of steps that needs all: two would wait for each other. In a pause none steps.
"""

from __future__ import annotations

import http.client
import inspect
import json
import re
import urllib.error
import urllib.request
from typing import Any

from rollmesh import errors
from rollmesh.errors import ConfigError, Error, SyncAbortedError
from rollmesh.runtime.messages import reason, shown

CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
OURS = re.compile(rf"\b({'|'.join(errors.__all__)}): ")


def client_of(client: Any, timeout: float) -> Any:
    """An object with the four calls, `spans` (whether an update needs a pause), and unless it has the calls alone: serving() → the versions
    of some of its workers, hold() → whether it had to pause, and release()."""
    if isinstance(client, str):
        return _Server(client, timeout)
    if lacking := [name for name in CALLS if not callable(getattr(client, name, None))]:
        raise ConfigError(f"client is a {type(client).__name__} without {', '.join(lacking)}, wanted vLLM's LLM or its four calls")
    if "request" not in inspect.signature(client.init_weight_transfer_engine).parameters:
        return _Plain(client)
    return _Offline(client) if hasattr(client, "llm_engine") else _Awaited(client)


def is_awaited(client: Any) -> bool:
    return inspect.iscoroutinefunction(client.start_weight_update)


class _Plain:
    spans = False

    def __init__(self, client: Any):
        self.init_weight_transfer_engine, self.update_weights = client.init_weight_transfer_engine, client.update_weights
        self.start_weight_update, self.finish_weight_update = client.start_weight_update, client.finish_weight_update


class _Requests:
    """What they return is passed on, to be awaited or not."""

    def __init__(self, engine: Any, config: Any):
        self.start_weight_update, self.finish_weight_update = engine.start_weight_update, engine.finish_weight_update
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
    """vllm.LLM, one for each data parallel rank where there are several."""

    def __init__(self, llm: Any):
        super().__init__(llm, llm.llm_engine.vllm_config)

    def hold(self) -> bool:
        if self._engine.llm_engine.is_sleeping():  # that is also when it is paused
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
    """How many data parallel ranks it has cannot be seen from here."""

    spans = True

    def __init__(self, url: str, timeout: float):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"client = {shown(url)}, wanted the URL of a vLLM server, with http:// in front")
        self._url, self._timeout = url.rstrip("/"), timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # http_proxy is for other machines' pages

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
        request = urllib.request.Request(f"{self._url}/{path}", None if body is None else json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            hint = "; VLLM_SERVER_DEV_MODE=1 makes the server take weights" if error.code == 404 else ""
            raise SyncAbortedError(f"{self._url}/{path}: {error.code} {error.read()[:4000].decode(errors='replace')}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            raise SyncAbortedError(f"{self._url}/{path}: {reason(error)}") from error


def understood(error: BaseException) -> BaseException:
    """vLLM's calls give the words of what a worker raised. Where they name a class of ours, an exception of it; the last name is
    what another rank was stopped by."""
    names = OURS.findall(str(error)) if isinstance(error, Exception) else []
    if not names or (isinstance(error, Error) and type(error) is not SyncAbortedError):
        return error
    known: Error = getattr(errors, names[-1])(str(error))
    known.__cause__ = error
    return known
