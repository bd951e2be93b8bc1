"""Judge answers with a language model behind any server that speaks the OpenAI chat protocol.

The server is not trusted: a reply is bounded in time and in bytes, the key goes to no other server, and it is removed
from whatever the server says.
"""

import asyncio
import ipaddress
import json
import os
import re
import socket
import threading
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from clustrs import __version__, validation
from clustrs.evaluation.judge_text import prompt, read_score, redact, without_thinking

if TYPE_CHECKING:
    import httpx2
    import openai

LARGEST_REPLY = 4_000_000
"""Bytes of a reply, as sent and decoded; anything longer is not a score."""
LONGEST_LINE = 300
"""Characters of an error message."""
REPLY_PAUSE = 0.5
"""Seconds before a reply that is not a score is asked for again; doubles from try to try, up to 8 s."""
REFUSES_ALL = (401, 402, 404)
"""Statuses that every other request would get as well: bad key, no credit, unknown address or model."""
LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")

HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


class JudgeError(ValueError):
    """An answer that got no score; the message has one line and no key."""


class JudgeUnavailable(JudgeError):
    """A server that cannot be reached or does no work; another answer may fare no better."""


class JudgeRefused(JudgeError):
    """A refusal that holds for every other answer, too."""


class _BadReply(Exception):
    """A reply that is not a score."""


@dataclass(frozen=True)
class Judge:
    """Language model that scores answers.

    openai's client sends the requests and repeats those that fail (lost connections, time-outs, 408, 409, 429, 5xx)
    with growing pauses, or after the time that the server asks for, at most two minutes. No redirect is followed, and a
    server on this machine is reached without a proxy, so that the key goes to the named server alone.

    Args:
        model: Name of the judge's model.
        url: Base address of the server, for example ``http://127.0.0.1:8000/v1``.
        key: API key, if the server needs one. It is sent to the server and written nowhere.
        timeout: Seconds for each try, from the connection to the last byte.
        retries: How many further requests are made for an answer, be it after a failure or after a reply that is not a
            score.

    Raises:
        ValueError: An argument is not valid.

    Examples:
        >>> judge = Judge("my-model", "http://127.0.0.1:8000/v1")
        >>> judge
        Judge(model='my-model', url='http://127.0.0.1:8000/v1', timeout=60, retries=5)
    """

    model: str
    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 60
    retries: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ValueError(f"model must be the name of the judge's model, got {self.model!r}")
        check_url(self.url)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        object.__setattr__(self, "key", (self.key or "").strip() or None)
        if self.key and not re.fullmatch(r"[!#-&(-\[\]-~]+", self.key):
            raise ValueError("key must be ASCII without spaces and quotes (write it as the server's owner gave it)")
        if not validation.is_number(self.timeout) or not self.timeout >= 1e-3:
            raise ValueError(f"timeout must be seconds, at least 0.001, got {self.timeout!r}")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"retries must be an integer >= 0, got {self.retries!r}")

    def score(self, question: str, answer: str, prediction: str) -> float:
        """Score an answer.

        Args:
            question: What the model under test was asked.
            answer: The expected answer, where ``<AND>`` needs all parts and ``<OR>`` one of them.
            prediction: What the model answered.

        Returns:
            A score from 0 to 1.

        Raises:
            JudgeError: There is no score after the last try.
        """
        future = asyncio.run_coroutine_threadsafe(self.ask(question, answer, prediction), event_loop())
        try:
            return future.result()
        finally:
            future.cancel()

    async def ask(self, question: str, answer: str, prediction: str) -> float:
        """Score an answer as `score` does; runs in `event_loop`."""
        content, left, pause = prompt(question, answer, prediction), self.retries, REPLY_PAUSE
        while True:
            reply, taken = await self._request(content, left)
            left -= taken
            try:
                return _read_completion(reply)
            except _BadReply as error:
                if left <= 0:
                    raise self._error(str(error), JudgeError, self.retries + 1) from None
            left -= 1
            await asyncio.sleep(pause)
            pause = min(8.0, 2 * pause)

    async def _request(self, content: str, retries: int) -> tuple[bytes, int]:
        """Return the body of the reply, and how many retries it took."""
        import httpx2
        import openai

        try:
            raw = await self._client.with_options(max_retries=retries).chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                extra_headers=None if self.key else {"Authorization": openai.Omit()},
            )
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APITimeoutError:
            message = f"no whole reply from {self.url} within {self.timeout:g} s"
            raise self._error(message, JudgeUnavailable, self.retries + 1) from None
        except (openai.APIConnectionError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            message = f"no reply from {self.url}: {root_cause(error)}"
            raise self._error(message, JudgeUnavailable, self.retries + 1) from None
        return raw.content, raw.retries_taken

    @cached_property
    def _client(self) -> "openai.AsyncOpenAI":
        import openai

        absent = openai.Omit()
        headers: dict[str, Any] = {
            "User-Agent": f"clustrs/{__version__}",
            "Accept-Encoding": "identity",
            "OpenAI-Organization": absent,
            "OpenAI-Project": absent,
        }
        return openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=self.url,
            timeout=self.timeout,
            default_headers=headers,
            http_client=bounded_client(self.timeout, trust_env=not is_this_machine(self.url)),
        )

    def _refusal(self, error: "openai.APIStatusError") -> JudgeError:
        """Turn an HTTP status into an error."""
        status, response = error.status_code, error.response
        text = f"the server says {status}: {server_message(response.content) or response.reason_phrase}"
        tries = int(response.request.headers.get("x-stainless-retry-count", 0)) + 1
        if 300 <= status < 400:
            return self._error(f"{text} (it points to {response.headers.get('Location')})", JudgeRefused)
        if status in (403, 408, 409, 429) or status >= 500:
            wait = response.headers.get("Retry-After")
            return self._error(f"{text} (Retry-After: {wait})" if wait else text, JudgeUnavailable, tries)
        return self._error(text, JudgeRefused if status in REFUSES_ALL else JudgeError)

    def _error(self, text: str, kind: type[JudgeError], tries: int = 1) -> JudgeError:
        """Make an error of one short line; the key is removed before anything is cut off."""
        line = " ".join(redact(text[: 20 * LONGEST_LINE], self.key).split())
        end = f" (tries: {tries})" if tries > 1 else ""
        return kind((line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}...") + end)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop in which all requests run, in a daemon thread: a process that ends does not wait for it."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="clustrs-judge", daemon=True).start()
        return _loop


def bounded_client(seconds: float, trust_env: bool) -> "httpx2.AsyncClient":
    """Return an HTTP client that gives a whole reply `seconds` and `LARGEST_REPLY` bytes, and follows no redirect.

    openai's own time-outs are per read: a server that sends a byte now and then would never meet them.
    """
    import httpx2
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            try:
                async with asyncio.timeout(seconds):
                    response = await super().send(request, **{**options, "stream": True})
                    try:
                        content = await read_bounded(response)
                    finally:
                        await response.aclose()
            except TimeoutError as error:
                raise httpx2.ReadTimeout(f"no whole reply within {seconds:g} s", request=request) from error
            gone = ("content-encoding", "content-length", "transfer-encoding")
            headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in gone]
            return httpx2.Response(response.status_code, headers=headers, content=content, request=request)

    return BoundedClient(trust_env=trust_env, follow_redirects=False, timeout=seconds)


async def read_bounded(response: "httpx2.Response") -> bytes:
    """Read and decode the body; an error as soon as it is longer than `LARGEST_REPLY`.

    Only plain replies are asked for. A server that compresses nevertheless is read as long as it is gzip or deflate.
    """
    import httpx2

    encoding = response.headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise httpx2.DecodingError(f"the reply has an encoding that was not asked for: {encoding[:40]}")
    decoder = None if encoding == "identity" else zlib.decompressobj(wbits=47)
    body, received = bytearray(), 0
    async for chunk in response.aiter_raw():
        received += len(chunk)
        try:
            body += decoder.decompress(chunk, LARGEST_REPLY + 1 - len(body)) if decoder else chunk
        except zlib.error:
            raise httpx2.DecodingError(f"the reply is not valid {encoding}") from None
        if max(received, len(body)) > LARGEST_REPLY:
            raise httpx2.ReadError(f"the reply is longer than {LARGEST_REPLY} bytes")
    return bytes(body)


def check_url(url: object) -> None:
    """Raise a ValueError unless it is a plain http(s) address; one that may hold a password is not repeated."""
    accepted = "(write https://api.openai.com/v1 or http://127.0.0.1:8000/v1)"
    if isinstance(url, str) and any(sign in url for sign in "@?#"):
        raise ValueError(f"url must have no @, ? or #; a key belongs into OPENAI_API_KEY {accepted}")
    try:
        parts = urlsplit(url if isinstance(url, str) and re.fullmatch(r"[!-~]+", url) else "")
        usable = parts.scheme in ("http", "https") and parts.port != 0 and _is_host(parts)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"url must be the base address of a server, got {validation.excerpt(url)} {accepted}")


def _is_host(parts: SplitResult) -> bool:
    """Check the host of an address: a name, an IPv4 address in any notation, or an IPv6 address in brackets."""
    host = parts.hostname or ""
    if "[" in parts.netloc:
        return bool(re.fullmatch(r"\[[^]]*\](:[0-9]*)?", parts.netloc)) and ipaddress.ip_address(host).version == 6
    labels = host.removesuffix(".").split(".")
    if labels[-1].isdigit():
        return _ipv4(host) is not None
    return len(host) <= 253 and all(map(HOST_LABEL.fullmatch, labels))


def _ipv4(host: str) -> ipaddress.IPv4Address | None:
    """Parse an address in any notation: 127.0.0.1, 127.1, 2130706433, 0x7f.1."""
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (ValueError, OSError):
        return None


def is_this_machine(url: str) -> bool:
    """Check whether an address belongs to this machine, by name (its own, or one for the loopback) or by number."""
    host = (urlsplit(url).hostname or "").removesuffix(".").lower()
    own = socket.gethostname().removesuffix(".").lower()
    if host in (*LOCAL_NAMES, own, own.partition(".")[0]) or host.endswith(".localhost"):
        return True
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
    address = ipaddress.IPv6Address(host) if ":" in host else _ipv4(host)
    if address is None:
        return "." in host and host == socket.getfqdn().removesuffix(".").lower()
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as own_socket:  # only an address of this machine can be bound
            own_socket.bind((str(address), 0))
            return True
    except OSError:
        return False


def root_cause(error: BaseException) -> str:
    """Return what the system said, below the layers of libraries that only say that something failed."""
    below: BaseException | None = error
    while below is not None:
        error = below
        context = error.__context__ if isinstance(error.__context__, OSError | BaseExceptionGroup) else None
        below = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or context
    known = isinstance(error, ConnectionError) and error.errno
    return os.strerror(known) if known else str(error) or type(error).__name__


def server_message(raw: bytes) -> str:
    """Return what the body of an error says: the message in its JSON, or all of it."""
    text = raw.decode(errors="replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for key in ("error", "message", "detail"):
        if isinstance(data, dict) and data.get(key):
            data = data[key]
    return data if isinstance(data, str) else json.dumps(data)


def _read_completion(raw: bytes) -> float:
    """Read the score in the body of a chat completion."""
    try:
        text = json.loads(raw)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _BadReply(f"the reply is not a chat completion: {raw.decode(errors='replace')}") from None
    if not isinstance(text, str):
        raise _BadReply("the reply has no text")
    score = read_score(text)
    if score is None:
        raise _BadReply(f"the reply is not a number from 0 to 1 and nothing else: {without_thinking(text)}")
    return score
