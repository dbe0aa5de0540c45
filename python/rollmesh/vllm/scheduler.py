"""vLLM's schedulers, with one thing more: a request that the worker says has failed ends, alone, and says why.

A worker cannot raise for one request: what execute_model raises ends the engine. So a ModelRunnerOutput may carry, as an attribute
that is there only when some have failed,

    rollmesh_failed: dict[request id, message]

and these requests end with finish_reason "error" and the message as stop_reason. Their KV pages leave the prefix cache: vLLM puts
a page in when it hands it out, before anything is computed. Here fail only requests whose input streams in, at their first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

FAILED = "rollmesh_failed"
STREAMS = "RequestError: input that streams in, wanted a prompt that is whole"
MAX_STREAMS = 4096


class EndsFailed:
    """In front of a scheduler of vLLM's."""

    if TYPE_CHECKING:
        requests: dict[str, Any]
        kv_cache_manager: Any

        def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]: ...

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._streams: dict[str, None] = {}  # sessions that were refused; parts of them may still come

    def add_request(self, request: Any) -> None:
        if request.resumable:
            self._streams[request.request_id] = None
            if len(self._streams) > MAX_STREAMS:
                del self._streams[next(iter(self._streams))]
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        streams = self._streams.keys() & scheduler_output.num_scheduled_tokens.keys()
        failed = dict.fromkeys(streams, STREAMS) | getattr(model_runner_output, FAILED, {})
        ended = self._end(failed) if failed else []
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for request in ended:
            end = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=failed[request.request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            more = sum(part is not None for part in request.streaming_queue or ())  # the front end waits for the end of each
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.extend([end] * (1 + more))
        return outputs

    def _end(self, failed: dict[str, str]) -> list[Any]:
        """Before vLLM looks at the step's tokens: it passes over requests that are gone, as it does over aborted ones."""
        for request_id in failed:
            if request_id in self.requests:
                pages = self.kv_cache_manager.get_block_ids(request_id)
                self.kv_cache_manager.evict_blocks({page for group in pages for page in group})
        return self.finish_requests(failed, RequestStatus.FINISHED_ERROR)


class Scheduler(EndsFailed, scheduler.Scheduler):  # type: ignore[misc]
    """Of synchronous scheduling."""


class AsyncScheduler(EndsFailed, async_scheduler.AsyncScheduler):  # type: ignore[misc]
    """Of asynchronous scheduling."""
