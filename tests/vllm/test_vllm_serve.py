"""The real `vllm serve` on rollmesh, in separate processes, and a trainer that only has its URL.

Input: a small MoE model without weights, and a tokenizer with a few more ids than the model;
prompts are token ids. Oracle: rm.Generator with the same weights. Bound: 0 differing bits. JSON
writes enough digits to restore a double, and a double holds any float32, so a logprob keeps its 32
bits; support.bits checks that the received value is a float32.

One server serves all tests. Each test ends by comparing a full set of requests with the version
that should serve then.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_support as support

import rollmesh as rm
from rollmesh import errors
from rollmesh.vllm.trainer import WeightSender

for needed in (
    "vllm",
    "prometheus_fastapi_instrumentator",
    "model_hosting_container_standards",
    "tokenizers",
):
    pytest.importorskip(needed, reason=f"vllm serve needs {needed}")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

MODEL, DTYPE = "moe", "bfloat16"
LONG, LONGEST = (
    240,
    280,
    # Tokens of an answer and of a text: long enough that an engine that runs ahead of its server
    # has not finished before a client calls.
)
VOCAB = support.SIZES["vocab_size"]
STARTS, ENDS = 240.0, 60.0  # seconds
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def model_folder(at: Path) -> str:
    """A folder with a tokenizer, which servers need. vLLM refuses ids that neither the tokenizer
    nor the model has; the last ten are only in the tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = support.folder(at, MODEL)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB + 10)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(f"{path}/tokenizer.json")
    stock = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "chat_template": TEMPLATE,
    }
    Path(path, "tokenizer_config.json").write_text(json.dumps(stock))
    return path


def flags(options: dict[str, Any]) -> list[str]:
    """Returns the options as the flags of a command line."""
    words = []
    for name, value in options.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}"] + (
                [] if value is True else [value if isinstance(value, str) else json.dumps(value)]
            )
    return words


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Oracle(support.Oracle):
    """The oracle for longer texts."""

    def __init__(self, model: str, dtype: str):
        super().__init__(model, dtype)
        self.generator.close()
        spec = rm.ModelSpec.from_hf(self.case.config)
        self.generator = rm.Generator(
            spec, dtype=dtype, max_model_len=LONGEST, kv_cache_gib=0.02, threads=1
        )


# ------------------------------------------------------------------------------------- the server
class Server:
    """The server's process and its clients' calls. `version` is the version that should serve,
    which the oracle has."""

    def __init__(self, at: Path):
        options = support.options(
            at, MODEL, DTYPE, skip_tokenizer_init=False, max_model_len=LONGEST
        )
        self.model, self.port, self.log, self.version = model_folder(at), free_port(), at / "log", 0
        self.url = f"http://127.0.0.1:{self.port}"
        self.oracle, self.sender = Oracle(MODEL, DTYPE), WeightSender(self.url)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.pop("model")]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *flags(options)]
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=at,
                start_new_session=True,
            )

    def wait(self) -> None:
        end = time.monotonic() + STARTS
        while time.monotonic() < end:
            assert self.process.poll() is None, (
                f"vllm serve has ended: {self.log.read_text()[-4000:]}"
            )
            try:
                assert self.ask("health")[0] == 200
                return
            except urllib.error.URLError:
                time.sleep(0.1)
        raise AssertionError(f"vllm serve does not answer: {self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """Stops the server like an operator, and checks that all its processes and shared memory
        are gone."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                assert self.process.wait(ENDS) in (0, -signal.SIGTERM)
            end = time.monotonic() + ENDS
            while self._alive():
                assert time.monotonic() < end, "processes of the server's are left"
                time.sleep(0.05)
        finally:
            if self._alive():
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.oracle.close()

    def _alive(self) -> bool:
        """Returns whether any process of the server's group is alive."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    # ------------------------------------------------------------------------------- its endpoints
    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Sends a GET without a body. Returns the status and the answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def do(self, path: str, body: Any = None) -> Any:
        status, said = self.ask(path, {} if body is None else body)
        assert status == 200, said
        return said

    def rpc(self, method: str) -> Any:
        return self.do("collective_rpc", {"method": method})["results"]

    def body(self, request: support.Request, **changes: Any) -> dict[str, Any]:
        given = {"model": self.model, "prompt": list(request.prompt), **request.settings}
        return {**given, "return_token_ids": True, "return_tokens_as_token_ids": True, **changes}

    def complete(self, request: support.Request, **changes: Any) -> tuple[int, Any]:
        return self.ask("v1/completions", self.body(request, **changes))

    def follow(self, request: support.Request, answer: support.Answer) -> None:
        """Streams the drawn tokens into `answer`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(
                "POST", "/v1/completions", json.dumps(self.body(request, stream=True)), headers
            )
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "choices" in event, event
                    take(event["choices"][0], answer)
        finally:
            connection.close()

    # ---------------------------------------------------------------------------------- the oracle
    def weights(self, version: int) -> support.Weights:
        return support.weights_of(MODEL, DTYPE, version)

    def push(self, label: str | None = None, weights: support.Weights | None = None) -> None:
        self.version += 1
        weights = self.weights(self.version) if weights is None else weights
        self.sender.send(weights, self.version, label)
        self.oracle.serve(weights)

    def hold(self, seed: int = 0) -> None:
        """Sends all requests at once and compares the answers. Prompts repeat over versions without
        a reset of the cache."""
        requests = support.mixed(MODEL, seed)
        with ThreadPoolExecutor(len(requests)) as pool:
            said = list(pool.map(self.complete, requests))
        assert [status for status, _ in said] == [200] * len(requests), said
        got = [answers(words) for _, words in said]
        assert support.agree(got, support.without_ranks(self.oracle.answers(requests))) > 500
        assert self.rpc("weight_version") == [str(self.version)]


def position(values: dict[str, float]) -> support.Position:
    """Completions have no ranks."""
    names = [int(name.removeprefix("token_id:")) for name in values]
    return {
        name: (word, 0)
        for name, word in zip(names, support.bits(list(values.values())), strict=True)
    }


def take(choice: dict[str, Any], answer: support.Answer) -> None:
    answer.tokens += choice["token_ids"]
    answer.end = (choice["finish_reason"], choice["stop_reason"])
    if (logprobs := choice["logprobs"]) is not None:
        assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        likeliest = logprobs["top_logprobs"]
        assert [
            values[name] for name, values in zip(logprobs["tokens"], likeliest, strict=True)
        ] == logprobs["token_logprobs"]
        answer.positions += [position(values) for values in likeliest]


def answers(said: dict[str, Any]) -> list[support.Answer]:
    """Returns the answers for one prompt."""
    choices = sorted(said["choices"], key=lambda choice: choice["index"])
    result = []
    if (prompt := choices[0]["prompt_logprobs"]) is not None:
        assert prompt[0] is None
        positions = [
            position({token: entry["logprob"] for token, entry in entries.items()})
            for entries in prompt[1:]
        ]
        result.append(support.Answer(-1, choices[0]["prompt_token_ids"], (None, None), positions))
    for choice in choices:
        result.append(support.Answer(choice["index"], [], (None, None), []))
        take(choice, result[-1])
    return result


SIMPLE = support.request([1, 2, 3])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve"))
    try:
        importlib.import_module("rollmesh.vllm.serve")  # vLLM exits with it in the meantime
        server.wait()
        refused_without_weights(server)
        server.push()
        yield server
        no_riddles(server.log.read_text())  # vLLM's own log output at its end is ignored
    finally:
        server.stop()


# ----------------------------------------------------------------------------- requests that fail
def events(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream that failed."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def refused_without_weights(server: Server) -> None:
    """Each endpoint reports in its own format what is missing, and that the request can be
    repeated."""
    message = "NotSyncedError: weights: expected synced ones, got none; call sync_weights first"
    wanted = {"message": message, "type": "ServiceUnavailableError", "code": 503}
    talk = {
        "model": server.model,
        "messages": [{"role": "user", "content": "w1 w2"}],
        "max_tokens": 3,
    }
    said = [
        server.complete(SIMPLE),
        server.complete(support.request([1, 2, 3], n=3, temperature=1.0)),
        server.complete(SIMPLE, prompt=[[1, 2], [3]]),
        server.ask("v1/chat/completions", talk),
    ]
    for status, words in said:
        assert (status, words["error"]) == (503, wanted | {"param": None})
    assert events(server, server.body(SIMPLE, stream=True)) == [{"error": wanted | {"param": None}}]
    assert server.rpc("weight_version") == [None]


def test_ids_that_are_none(served: Server) -> None:
    """The request is at fault, detected by vLLM's check or by the worker's. Other requests beside
    it are served."""
    status, words = served.complete(support.request([1, VOCAB + 4000]))
    assert (status, words["error"]["message"]) == (
        400,
        f"Token id {VOCAB + 4000} is out of vocabulary",
    )
    bad = support.request([1, VOCAB + 5], temperature=1.0)
    wanted = {
        "message": f"RequestError: the prompt: expected token ids in [0, {VOCAB}), got {VOCAB + 5}",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(served.hold)
        said = list(
            pool.map(
                lambda changes: served.complete(bad, **changes),
                ({}, {"n": 2}, {"prompt": [[1, 2], list(bad.prompt)]}),
            )
        )
        beside.result()
    assert said == [(400, {"error": wanted})] * 3
    assert events(served, served.body(bad, stream=True)) == [{"error": wanted}]
    served.hold()


def test_errors_that_are_not_ours(served: Server) -> None:
    """vLLM's own refusals keep their status and words."""
    status, words = served.complete(SIMPLE, model="another")
    assert (status, words["error"]["type"]) == (404, "NotFoundError")
    status, words = served.ask("collective_rpc", {"method": "no_such_method"})
    assert status == 500
    assert "no_such_method" in words["error"]["message"]
    assert served.ask("no_such_path")[0] == 404


BARE = json.dumps(
    {
        "error": {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
).encode()
SAID = json.dumps({"choices": [{"text": "Internal server error"}]}).encode()


@pytest.mark.parametrize(
    "status, parts, known, code",
    [
        (500, [BARE], [None, "NumericsError: a row"], 500),
        (500, [BARE], ["words of another library"], 500),
        (500, [BARE], [None, None], None),
        (500, [BARE], "VLLMServerError", None),  # EngineDeadError is one
        (500, [BARE], "Exception", None),
        (500, [BARE], "TimeoutError", None),
        (500, [BARE[:60], BARE[60:]], ["RequestError: a word"], None),
        (500, [b"Internal server error"], ["RequestError: a word"], None),
        (200, [SAID], ["RequestError: a word"], None),
        (
            200,
            [b"data: " + SAID + b"\n\n", b"data: " + BARE + b"\n\n", b"data: [DONE]\n\n"],
            ["CapacityError: too long"],
            400,
        ),
    ],
)
def test_what_is_put_in_its_place(
    status: int, parts: list[bytes], known: Any, code: int | None
) -> None:
    """Input: an answer by vLLM's server to a request for which the workers know the reason or not.
    Code None: the answer is unchanged."""
    from vllm.exceptions import VLLMServerError

    from rollmesh.vllm.serve import Reasons

    length = (b"Content-Length", str(sum(map(len, parts))).encode())
    begun: list[Any] = [
        {"type": "http.response.start", "status": status, "headers": [(b"vary", b"Origin"), length]}
    ]
    begun += [
        {"type": "http.response.body", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    told: list[Any] = []

    async def collective_rpc(method: str, timeout: None, args: tuple[str, ...]) -> list[str | None]:
        assert (method, timeout, args) == ("why_failed", None, ("cmpl-1",))
        if isinstance(known, str):
            raise {
                "VLLMServerError": VLLMServerError,
                "Exception": Exception,
                "TimeoutError": TimeoutError,
            }[known]
        return list(known)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["request_metadata"] = SimpleNamespace(request_id="cmpl-1")
        for message in begun:
            await send(dict(message))

    async def send(message: Any) -> None:
        told.append(message)

    state = SimpleNamespace(engine_client=SimpleNamespace(collective_rpc=collective_rpc))
    asyncio.run(
        Reasons(application)({"type": "http", "app": SimpleNamespace(state=state)}, None, send)
    )
    if code is None:
        assert told == begun
        return
    changed = [i for i, (got, was) in enumerate(zip(told, begun, strict=True)) if got != was]
    error = json.loads(told[changed[-1]]["body"].removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"]) == (known[-1], code)
    if status == 500:
        assert changed == [0, 1]
        assert told[0]["status"] == code
        assert sorted(told[0]["headers"]) == [
            (b"content-length", str(len(told[1]["body"])).encode()),
            (b"vary", b"Origin"),
        ]
    else:
        assert changed == [2]


# ------------------------------------------------------------------------------------------- bits
def test_bits(served: Server) -> None:
    for seed in range(3):
        served.hold(seed)


def test_streams_and_texts(served: Server) -> None:
    """The parts of a stream equal the answer; a text equals its ids."""
    requests = long_requests()
    got = [support.Answer(0, [], (None, None), []) for _ in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(served.follow, requests, got))
    support.agree(
        [[answer] for answer in got], support.without_ranks(served.oracle.answers(requests))
    )
    words = served.complete(SIMPLE, prompt="w1 w2 w3")[1]
    support.agree([answers(words)], support.without_ranks(served.oracle.answers([SIMPLE])))
    assert words["choices"][0]["text"].split() == [
        f"w{token}" for token in words["choices"][0]["token_ids"]
    ]


def test_stop_strings(served: Server) -> None:
    """The oracle is the answer without stop strings, up to the token that completes one."""
    whole = served.complete(SIMPLE, max_tokens=20)[1]["choices"][0]
    words = whole["text"].split()
    stop = next(word for i, word in enumerate(words) if i >= 5 and word not in words[:i])
    for strings in ([f"{stop} "], ["no such word", stop]):
        cut = served.complete(SIMPLE, max_tokens=20, stop=strings)[1]["choices"][0]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", strings[-1])
        assert cut["text"] == whole["text"][: whole["text"].index(strings[-1])]
        assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
        assert words.index(stop) < len(cut["token_ids"]) <= words.index(stop) + 2


# ------------------------------------------------------------------------------------ new weights
def long_requests() -> list[support.Request]:
    """Two requests more than can run at a time."""
    return [
        support.request(
            [50 + i] * (4 + 4 * i),
            seed=i,
            temperature=[1.0, 0.0][i % 2],
            logprobs=2,
            max_tokens=LONG,
        )
        for i in range(8)
    ]


class Running:
    """Streaming requests, and their output so far."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor):
        self.requests = long_requests()
        self.answers = [support.Answer(0, [], (None, None), []) for _ in self.requests]
        self.futures: list[Future[None]] = [
            pool.submit(server.follow, *each)
            for each in zip(self.requests, self.answers, strict=True)
        ]
        while max(map(len, self.tokens())) < 6:
            assert not any(future.done() for future in self.futures)
            time.sleep(0.001)

    def tokens(self) -> list[list[int]]:
        return [list(answer.tokens) for answer in self.answers]

    def result(self) -> list[support.Answer]:
        for future in self.futures:
            future.result(60)
        return self.answers


def test_a_push_while_requests_run(served: Server) -> None:
    """Each request continues as if its text so far had been a prompt of the new version."""
    cut = 0
    for _ in range(6):
        before = support.without_ranks(served.oracle.answers(long_requests()))
        weights = served.weights(served.version + 1)
        with ThreadPoolExecutor(len(long_requests())) as pool:
            running = Running(served, pool)
            held = [len(tokens) for tokens in running.tokens()]
            served.push(weights=weights)
            got = running.result()
        for i, request in enumerate(running.requests):
            (first,), n = before[i], len(before[i][0].tokens)
            end = held[i]  # tokens may have been drawn but not returned yet
            while (
                end < n
                and got[i].tokens[end] == first.tokens[end]
                and got[i].positions[end] == first.positions[end]
            ):
                end += 1
            rests = [
                support.continued(served.oracle, request, first, at)
                for at in range(max(held[i], end - 2), end + 1)
                if at < n
            ]
            wanted = [
                *support.without_ranks([[rest] for rest in rests]),
                *([[first]] if end == n else []),
            ]
            assert [got[i]] in wanted, (
                f"request {i} is not the old version's up to a token, and the new one's from there"
            )
            cut += 0 < end < n
        served.hold()
        if cut:
            break
    assert cut > 0, "no request was in its middle at a push: nothing was shown"


def nan(tensor: np.ndarray) -> np.ndarray:
    spoiled = tensor.copy()
    spoiled[-1, 3] = np.nan
    return spoiled


LATE = "model.layers.1.mlp.experts.17.down_proj.weight"
SPOILED: dict[str, tuple[Callable[[support.Weights], support.Weights], type[rm.Error]]] = {
    "not finite": (lambda w: w | {LATE: nan(w[LATE])}, rm.NonFiniteError),
    "transposed": (lambda w: w | {LATE: w[LATE].T.copy()}, rm.ShapeError),
    "missing": (
        lambda w: {name: x for name, x in w.items() if name != LATE},
        rm.IncompleteSyncError,
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_bad_push(served: Server, how: str) -> None:
    """The trainer gets the error by its class, with the tensor's name; the old version serves, and
    generation is not left paused."""
    spoil, error = SPOILED[how]
    with pytest.raises(error, match=re.escape(LATE)) as caught:
        served.sender.send(spoil(served.weights(99)), served.version + 1)
    assert type(caught.value) is error
    assert served.ask("is_paused") == (200, {"is_paused": False})
    served.hold()
    served.push()
    served.hold()


def test_names_of_a_version(served: Server) -> None:
    """vLLM's label, the worker's number, and the checksums of the serving weights; a refused set
    does not change them."""
    served.push("step-one")
    one = (
        served.ask("weight_info"),
        served.do("weight_checker", {"action": "checksum"})["checksums"],
    )
    assert one[0] == (200, {"weight_version": "step-one"})
    with pytest.raises(rm.VersionError):
        served.sender.send(served.weights(served.version), served.version, "step-none")
    assert served.ask("weight_info") == one[0]
    compared = served.do("weight_checker", {"action": "compare", "baseline": one[1]})
    assert compared == {"match": True, "mismatches": []}
    served.push()
    assert served.ask("weight_info") == (200, {"weight_version": str(served.version)})
    assert not served.do("weight_checker", {"action": "compare", "baseline": one[1]})["match"]
    metrics = served.rpc("metrics")[0]
    assert metrics["version"] == served.version
    served.hold()


def test_two_trainers_at_once(served: Server) -> None:
    """Each trainer learns that its set was accepted, or the reason of the refusal; afterwards one
    of the sets serves, complete."""
    taken, ends = [served.version], list[rm.Error]()
    begin = threading.Barrier(2)

    def train(first: int) -> None:
        sender = WeightSender(served.url, block_bytes=20_000)
        begin.wait()
        for version in range(first, first + 12, 2):
            try:
                sender.send(served.weights(version), version)
                taken.append(version)
            except rm.Error as error:
                ends.append(error)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, (served.version + 1, served.version + 2)))
    kinds = {type(error) for error in ends}
    assert kinds <= {rm.StateError, rm.VersionError}, ends
    assert len(taken) > 1
    served.version = int(served.rpc("weight_version")[0])
    assert served.version == max(taken)
    served.oracle.serve(served.weights(served.version))
    assert not served.ask("is_paused")[1]["is_paused"]
    served.hold()
    served.version += 20
    served.push()
    served.hold()


# -------------------------------------------------------------------------------- pause and sleep


def test_sleep_and_reload(served: Server) -> None:
    served.do("sleep?level=1")
    assert served.ask("is_sleeping") == (200, {"is_sleeping": True})
    served.do("wake_up")
    assert served.ask("is_sleeping") == (200, {"is_sleeping": False})
    served.hold()
    served.do("sleep?level=2")
    with pytest.raises(rm.StateError, match="asleep"):
        served.sender.send(served.weights(98), served.version + 1)
    served.do("wake_up?tags=weights")
    served.push()
    served.do("wake_up?tags=kv_cache")
    served.hold()
    served.do("sleep?level=2")
    served.do("wake_up")
    status, words = served.complete(SIMPLE)  # level 2 has dropped the weights
    assert (status, words["error"]["message"].partition(":")[0]) == (503, "NotSyncedError")
    served.push()
    served.hold()


# ---------------------------------------------------------------------------------------- the log
def no_riddles(log: str) -> None:
    """vLLM logs a traceback for a trainer's failed call. Each such traceback must end in an error
    of rollmesh with the reason."""
    ours = re.compile(
        r"(rollmesh\.errors\.|Exception: Call to collective_rpc method failed: "
        rf")({'|'.join(errors.__all__)}): .+"
    )
    lines = [
        re.sub(r"^\(\w+ pid=\d+\) \w+ \S+ \S+ \[\S+\] ", "", line) for line in log.splitlines()
    ]
    for i, line in enumerate(lines):
        if not line.startswith("Traceback "):
            continue
        end, *after = (line for line in lines[i + 1 :] if line.strip() and not line.startswith(" "))
        if after and after[0].startswith(("The above exception", "During handling")):
            continue  # the traceback continues
        assert ours.fullmatch(end) or "no_such_method" in end, (
            f"the log has a traceback that ends in {end!r}"
        )
