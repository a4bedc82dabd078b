"""A small OpenAI-compatible server in this process; its answers follow from prompt and seed."""

import asyncio
import base64
import json
import threading

import numpy as np
from aiohttp import web

from raybatch.backends.fake import fake_answer, fake_vector
from raybatch.records.types import Request, Sampling

# block size of the server's prefix cache
_BLOCK = 16
_SAMPLING = ("max_tokens", "min_tokens", "temperature", "n", "stop_token_ids")


class EndpointServer:
    """Serves /v1 from a separate thread; use it as a context manager.

    Attributes:
        react: a function of the number of a request (from 0) and its body. It returns the
            answer: (status, headers, body), "drop" breaks the connection, "hang" never answers,
            and None answers as a model would.
        requested: bodies of the requests, in their order.
        headers: headers of the requests.
        num_answered: answers to requests since the last reset.
        most_at_once: largest number of concurrent requests.
    """

    def __init__(self, *, max_model_len=4096, error_on=None, is_stepped=False, delay_s=0.0):
        self.max_model_len = max_model_len
        self.error_on = error_on
        self.is_stepped = is_stepped
        self.num_now = self.num_steps = 0
        self.reset(delay_s=delay_s)
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._is_up.wait(20)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def reset(self, *, delay_s=0.0):
        """Forget all requests, and answer as a model would."""
        self.delay_s = delay_s
        self.react = lambda number, body: None
        self.requested, self.paths, self.headers = [], [], []
        self.num_answered = self.most_at_once = 0
        self._cached = set()

    def step(self):
        """Let sequences gain one token."""
        self.num_steps += 1
        self._loop.call_soon_threadsafe(self._stepped.set)

    def _main(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._begin())
        self._loop.run_forever()
        self._loop.close()

    async def _begin(self):
        self._stepped = asyncio.Event()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/embeddings", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._site._server.sockets[0].getsockname()[1]}/v1"
        self._is_up.set()

    async def _end(self):
        # asyncio needs some turns of the loop to hand over a new connection; one that is not handed
        # over when the server closes stays open
        for listening in self._site._server.sockets:
            self._loop.remove_reader(listening)
        for _ in range(10):
            await asyncio.sleep(0)
        await self._runner.cleanup()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "served"}]})

    async def _complete(self, request):
        body = await request.json()
        requested = self.requested
        requested.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            return await self._answer(request, requested, body)
        finally:
            self.num_now -= 1

    def _count_answer(self, requested):
        # late answers of an earlier test do not count
        self.num_answered += requested is self.requested

    async def _answer(self, request, requested, body):
        reaction = self.react(len(requested) - 1, body)
        if reaction == "drop":
            request.transport.close()
            return web.Response()
        if reaction == "hang":
            await asyncio.sleep(3600)
        if reaction is not None:
            status, headers, message = reaction
            text = message if isinstance(message, str) else json.dumps(message)
            return web.Response(status=status, headers=headers, text=text)
        prompt = prompt_ids(body)
        if len(prompt) >= self.max_model_len or self.error_on in prompt:
            return web.json_response({"error": {"message": "a bad prompt"}}, status=400)
        if "input" in body:
            self._count_answer(requested)
            return web.json_response(embedding_answer(body))
        answers = answers_to(body, self.max_model_len)
        if self.is_stepped:
            due = self.num_steps + max(len(answer.tokens) for answer in answers)
            while self.num_steps < due:
                self._stepped.clear()
                await self._stepped.wait()
        await asyncio.sleep(self.delay_s)
        self._count_answer(requested)
        return web.json_response(self._message(body, prompt, answers))

    def _message(self, body, prompt, answers):
        is_chat = "messages" in body
        choices = []
        for index, answer in enumerate(answers):
            choice = {
                "index": index,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            text = text_of(answer)
            choice |= {"message": {"content": text}} if is_chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = answer.tokens.tolist()
            choices.append(choice)
        cached = self._cache(prompt)
        return {
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sum(len(answer.tokens) for answer in answers),
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }

    def _cache(self, prompt):
        num_cached = 0
        for end in range(_BLOCK, len(prompt), _BLOCK):
            if prompt[:end] in self._cached:
                num_cached = end
            self._cached.add(prompt[:end])
        return num_cached


def prompt_ids(body):
    """Return the prompt as the server counts it: token ids, or the bytes of the texts."""
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list):
        return tuple(prompt)
    if prompt is None:
        prompt = "".join(f"{m['role']}:{m['content']}\n" for m in body["messages"])
    return tuple(prompt.encode())


def expected_embedding(body):
    """Return the vector that a server answers with."""
    options = {name: body[name] for name in ("dimensions", "use_activation") if name in body}
    request = Request(
        request_id=0,
        row_id="",
        prompt_token_ids=np.array(prompt_ids(body), np.int32),
        sampling=Sampling(),
        payload={"pooling": options},
    )
    return fake_vector(request, "embed")


def embedding_answer(body):
    """Return the answer of a server, in base64 if requested."""
    vector = expected_embedding(body)
    is_text = body.get("encoding_format") == "base64"
    message = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
    num_tokens = len(prompt_ids(body))
    return {
        "data": [{"object": "embedding", "index": 0, "embedding": message}],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def answers_to(body, max_model_len):
    """Return the answers of a model, one per sample."""
    names = {"max_completion_tokens": "max_tokens"}
    fields = {names.get(name, name): value for name, value in body.items()}
    sampling = Sampling(**{name: fields[name] for name in _SAMPLING if name in fields})
    request = Request(
        request_id=0,
        row_id="",
        prompt_token_ids=np.array(prompt_ids(body), np.int32),
        sampling=sampling,
        seed=body.get("seed", 0),
    )
    return [
        fake_answer(request, index, lengths="max", max_model_len=max_model_len)
        for index in range(sampling.n)
    ]


def text_of(answer):
    return " ".join(f"w{token}" for token in answer.tokens.tolist())


def expected_text(body, max_model_len=4096):
    """Return the text of the first sample that a server answers with."""
    return text_of(answers_to(body, max_model_len)[0])
