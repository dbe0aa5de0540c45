"""vLLM's schedulers, extended so that a single request can fail, with the reason that the worker
reports.

An exception in execute_model would end the whole engine. If requests have failed, the
ModelRunnerOutput therefore has an additional attribute:

    rollmesh_failed: dict[request id, message]

These requests end with finish_reason "error" and the message as stop_reason. Their KV pages are
evicted from the prefix cache, since vLLM adds a page to the cache before it is computed. Requests
with streaming input fail here, at their first step.

vLLM counts the cached tokens of a prompt when it schedules them. The worker recomputes pages of
older weights, so it returns the number of tokens that the cache served:

    rollmesh_cached: dict[request id, int]

This number becomes RequestOutput.num_cached_tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

FAILED = "rollmesh_failed"
CACHED = "rollmesh_cached"
STREAMS = "RequestError: expected a whole prompt, got streaming input"
MAX_STREAMS = 4096


class EndsFailed:
    """A mixin in front of vLLM's scheduler."""

    if TYPE_CHECKING:
        requests: dict[str, Any]
        kv_cache_manager: Any
        finish_requests: Any

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._streams: dict[str, None] = {}  # refused sessions, for which more input may arrive

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
        for name, cached in getattr(model_runner_output, CACHED, {}).items():
            request = self.requests.get(name)
            if request is not None and request.prefill_stats is not None:  # before its first token
                request.prefill_stats.set(request.num_prompt_tokens, cached, 0)
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
            # The front end waits for the end of each of these parts.
            more = sum(part is not None for part in request.streaming_queue or ())
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.extend(
                [end] * (1 + more)
            )
        return outputs

    def _end(self, failed: dict[str, str]) -> Any:
        """Ends failed requests before vLLM reads the tokens of the step. vLLM skips requests that
        have ended, like aborted ones."""
        for request_id in failed:
            if request_id in self.requests:
                pages = self.kv_cache_manager.get_block_ids(request_id)
                self.kv_cache_manager.evict_blocks({page for group in pages for page in group})
        return self.finish_requests(failed, RequestStatus.FINISHED_ERROR)


class Scheduler(EndsFailed, scheduler.Scheduler):  # type: ignore[misc]
    """The scheduler for synchronous scheduling."""


class AsyncScheduler(EndsFailed, async_scheduler.AsyncScheduler):  # type: ignore[misc]
    """The scheduler for asynchronous scheduling."""
