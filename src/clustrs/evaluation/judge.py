"""A language model that marks answers, behind any server that speaks the OpenAI chat protocol."""

import asyncio
import ipaddress
import json
import math
import os
import random
import re
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from clustrs import __version__
from clustrs.evaluation.judge_prompt import prompt, read_score, without_thinking
from clustrs.evaluation.redaction import redact

if TYPE_CHECKING:
    import httpx2
    import openai

LONGEST_PAUSE = 60.0
"""Seconds between two tries, unless the server asks for more."""
LONGEST_REQUESTED_PAUSE = 300.0
"""Seconds; a server that asks for more (a spent daily quota) is not waited for."""
LARGEST_REPLY = 4_000_000
"""Bytes; whatever is longer is not a mark."""
LONGEST_LINE = 300
CONCERNS_ALL = (401, 402, 404)
"""Bad key, no credit left, no such address or model: whatever is asked, the reply will be the same."""

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


class JudgeError(ValueError):
    """The judge gave no mark: why, in one line and without the key."""


class JudgeUnavailable(JudgeError):
    """As `JudgeError`, because the server could not be reached or did no work; another answer may fare no better."""


class JudgeRefused(JudgeError):
    """As `JudgeError`, for a reason that holds for every other answer too."""


class RetryableError(Exception):
    """One try went wrong, and another may not. `wait` is how long the server asks for, in seconds; `server` says
    whether the server is at fault rather than what it replied."""

    def __init__(self, message: str, wait: float | None = None, server: bool = False) -> None:
        super().__init__(message)
        self.wait = wait
        self.server = server


class _Message(msgspec.Struct):
    content: str | None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    """What is read of a chat completion."""

    choices: list[_Choice]


@dataclass(frozen=True)
class Judge:
    """A judge: its model's name, the server's base address (as in http://127.0.0.1:8000/v1), the key if it needs one.

    `timeout` in seconds, for each try from the connection to the last byte; `retries` after the first try; `backoff` is
    the first pause in seconds, which doubles from try to try. The key is sent to the server and appears nowhere else;
    a server on this machine is reached without a proxy.
    """

    model: str
    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 60
    retries: int = 5
    backoff: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ValueError(f"model={self.model!r}: give the name of the judge's model")
        check_url(self.url)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        object.__setattr__(self, "key", (self.key or "").strip() or None)
        if self.key and not re.fullmatch(r"[!#-&(-\[\]-~]+", self.key):
            raise ValueError("key: it has spaces, quotes or characters beyond ASCII, give it as the server's owner did")
        for name, low in (("timeout", 1e-3), ("backoff", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < math.inf:
                raise ValueError(f"{name}={value!r}: give seconds, at least {low:g}")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries={self.retries!r}: give an integer, at least 0")

    def score(self, question: str, answer: str, prediction: str, stop: threading.Event | None = None) -> float:
        """Ask for the mark from 0 to 1; a `JudgeError` when there is none after the last try, or `stop` is set."""
        stop = stop or threading.Event()
        content = prompt(question, answer, prediction)
        for tried in range(self.retries + 1):
            try:
                return self._mark(content)
            except RetryableError as error:
                problem = error
            if tried < self.retries and stop.wait(self._pause(tried, problem)):
                raise JudgeError("stopped before the judge had answered")
        kind = JudgeUnavailable if problem.server else JudgeError
        raise self._error(str(problem), f" (tries: {self.retries + 1})", kind)

    def _mark(self, content: str) -> float:
        """Ask once."""
        reply = self._reply(content)
        score = read_score(reply)
        if score is None:
            raise RetryableError(f"the reply is not a number from 0 to 1 and nothing else: {without_thinking(reply)}")
        return score

    def _reply(self, content: str) -> str:
        """Return what the judge says, in one try."""
        import httpx2
        import openai

        try:
            raw = asyncio.run_coroutine_threadsafe(self._request(content), event_loop()).result()
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except (TimeoutError, openai.APITimeoutError):
            raise RetryableError(f"no whole reply from {self.url} within {self.timeout:g} s", server=True) from None
        except (openai.APIConnectionError, httpx2.HTTPError, OSError) as error:
            raise RetryableError(f"no reply from {self.url}: {root_cause(error)}", server=True) from None
        try:
            text = msgspec.json.decode(raw, type=_Completion).choices[0].message.content
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError):
            raise RetryableError(f"the reply is not a chat completion: {raw.decode(errors='replace')}") from None
        if text is None:
            raise RetryableError("the reply has no text")
        return text

    async def _request(self, content: str) -> bytes:
        """Send the request and read the whole reply; runs in the event loop."""
        import openai

        async with (
            asyncio.timeout(self.timeout),
            self._client.chat.completions.with_streaming_response.create(
                model=self.model,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                extra_headers=None if self.key else {"Authorization": openai.Omit()},
            ) as response,
        ):
            return await response.read()

    @cached_property
    def _client(self) -> "openai.AsyncOpenAI":
        """Connects on first use, in the event loop. Follows no redirects: the key goes to the named server alone."""
        import openai

        absent = openai.Omit()
        headers: dict[str, Any] = {
            "User-Agent": f"clustrs/{__version__}",
            "OpenAI-Organization": absent,
            "OpenAI-Project": absent,
        }
        transport = openai.DefaultAsyncHttpxClient(
            trust_env=not is_loopback(self.url),
            follow_redirects=False,
            timeout=self.timeout,
            event_hooks={"response": [limit_size]},
        )
        return openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=self.url,
            max_retries=0,
            timeout=self.timeout,
            default_headers=headers,
            http_client=transport,
        )

    def _refusal(self, error: "openai.APIStatusError") -> RetryableError | JudgeError:
        """Tell what an HTTP status means: worth another try, or not."""
        status, response = error.status_code, error.response
        text = f"the server says {status}: {server_message(response.content) or response.reason_phrase}"
        wait = seconds_to_wait(response.headers.get("Retry-After"))
        if status in (408, 429) or status >= 500:
            if wait is not None and wait > LONGEST_REQUESTED_PAUSE:
                return self._error(text, f" (and to wait for {wait:.0f} s)", JudgeUnavailable)
            return RetryableError(text, wait, server=True)
        if 300 <= status < 400:
            return self._error(f"{text} (it points to {response.headers.get('Location')})", kind=JudgeRefused)
        if status == 403:
            return self._error(text, kind=JudgeUnavailable)
        return self._error(text, kind=JudgeRefused if status in CONCERNS_ALL else JudgeError)

    def _pause(self, tried: int, problem: RetryableError) -> float:
        """Seconds until the next try: longer from try to try, and not the same for those that failed together."""
        if problem.wait is not None:
            return problem.wait + random.uniform(0, self.backoff)
        return min(LONGEST_PAUSE, self.backoff * 2.0 ** min(tried, 30)) * random.uniform(0.5, 1.0)

    def _error(self, text: str, end: str = "", kind: type[JudgeError] = JudgeError) -> JudgeError:
        """An error of one short line, from which the key is taken out before anything is cut off."""
        line = " ".join(redact(text[: 20 * LONGEST_LINE], self.key).split())
        return kind((line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}...") + end)


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop in which all requests run, in a thread of its own. The thread is a daemon: nobody waits for it."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="clustrs-judge", daemon=True).start()
        return _loop


async def limit_size(response: "httpx2.Response") -> None:
    """Make a reply end with an error when it is longer than any sensible one."""
    import httpx2

    whole = response.stream

    class Limited(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            assert isinstance(whole, httpx2.AsyncByteStream)
            async for chunk in whole:
                size += len(chunk)
                if size > LARGEST_REPLY:
                    raise httpx2.ReadError(f"the reply is longer than {LARGEST_REPLY} bytes")
                yield chunk

        async def aclose(self) -> None:
            if isinstance(whole, httpx2.AsyncByteStream):
                await whole.aclose()

    response.stream = Limited()


def check_url(url: object) -> None:
    """A ValueError unless it is a plain http(s) address; one that may hold a password isn't repeated."""
    accepted = "give the base of the server, for example https://api.openai.com/v1 or http://127.0.0.1:8000/v1"
    if isinstance(url, str) and any(sign in url for sign in "@?#"):
        raise ValueError(f"url: there is a @, ? or # in it; a key goes into OPENAI_API_KEY, {accepted}")
    try:
        parts = urlsplit(url if isinstance(url, str) and re.fullmatch(r"[!-~]+", url) else "")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"url={url!r}: {accepted}")


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine, in any notation: localhost, 127.1, 2130706433, [::1], 0.0.0.0."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host) if ":" in host else ipaddress.ip_address(socket.inet_aton(host))
    except (ValueError, OSError):
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def root_cause(error: BaseException) -> str:
    """What the system said, below the layers of libraries that only say that something failed."""
    below: BaseException | None = error
    while below is not None:
        error = below
        context = error.__context__ if isinstance(error.__context__, OSError | BaseExceptionGroup) else None
        below = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or context
    known = isinstance(error, ConnectionError) and error.errno
    return os.strerror(known) if known else str(error) or type(error).__name__


def server_message(raw: bytes) -> str:
    """What the body of an error says: the message in its JSON, or all of it."""
    text = raw.decode(errors="replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for key in ("error", "message", "detail"):
        if isinstance(data, dict) and data.get(key):
            data = data[key]
    return data if isinstance(data, str) else json.dumps(data)


def seconds_to_wait(header: str | None) -> float | None:
    """What Retry-After asks for, be it a number or a date; None when it asks for nothing that makes sense."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
            seconds = date.replace(tzinfo=date.tzinfo or UTC).timestamp() - time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
