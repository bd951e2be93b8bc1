"""Judge answers with a language model behind any server that speaks the OpenAI chat protocol.

The server is not trusted: a reply is bounded in time and in bytes, the key goes to no other server, and it is removed
from whatever the server says. The verdicts of a run are stored in its `verdicts.jsonl`.
"""

import asyncio
import ipaddress
import json
import os
import re
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from clustrs import __version__, validation
from clustrs.evaluation.judge_text import prompt, read_score, redact, without_thinking
from clustrs.evaluation.results import Pair, stored_verdicts
from clustrs.evaluation.store import (
    VerdictRecord,
    drop_torn_line,
    encode_record,
    locked,
    read_answers,
    read_config,
)

if TYPE_CHECKING:
    import httpx2
    import openai

LARGEST_REPLY = 4_000_000  # bytes of a reply, as sent and decoded; anything longer is not a score
LONGEST_LINE = 300  # characters of an error message
REPLY_PAUSE = 0.5  # seconds before a reply that is not a score is asked for again; doubles from try to try, up to 8 s
REFUSES_ALL = (401, 402, 404)
"""Statuses that every other request would get as well: bad key, no credit, unknown address or model."""
UNCONFIRMED_CALLS = 10  # number of calls that need no confirmation
UNAVAILABLE_IN_A_ROW = 3  # answers in a row for which the server did nothing, after which judging stops
FAILED_IN_A_ROW = 20  # answers in a row without a score, for whatever reason, after which judging stops
LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
URL = re.compile(
    rf"https?://(?:(?P<host>{LABEL}(?:\.{LABEL})*\.?)|\[(?P<bracketed>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\])"
    r"(?::(?P<port>[0-9]{0,9}))?(?:/[!-~]*)?",
    re.IGNORECASE,
)
_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


class JudgeError(ValueError):
    """An answer that got no score; the message has one line and no key."""


class JudgeUnavailable(JudgeError):
    """A server that cannot be reached or does no work; another answer may fare no better."""


class JudgeRefused(JudgeError):
    """A refusal that holds for every other answer, too."""


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
        validation.integer("retries", self.retries, 0)

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
        content, left, pause = prompt(question, answer, prediction), self.retries, REPLY_PAUSE
        while True:
            raw = await self._request(content, left)
            left -= raw.retries_taken + 1
            try:
                text = json.loads(raw.content)["choices"][0]["message"]["content"]
                score = read_score(text)
                wrong = f"the reply is not a number from 0 to 1 and nothing else: {without_thinking(text)}"
            except (ValueError, LookupError, TypeError, RecursionError):
                score, wrong = None, f"the reply is not a chat completion: {raw.content.decode(errors='replace')}"
            if score is not None:
                return score
            if left < 0:
                raise self._error(wrong, JudgeError, self.retries + 1)
            await asyncio.sleep(pause)
            pause = min(8.0, 2 * pause)

    async def _request(self, content: str, retries: int) -> Any:
        import httpx2
        import openai

        try:
            return await self._client.with_options(max_retries=retries).chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                extra_headers=None if self.key else {"Authorization": openai.Omit()},
            )
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APITimeoutError:
            message = f"no whole reply from {self.url} within {self.timeout:g} s"
        except (openai.APIConnectionError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            message = f"no reply from {self.url}: {root_cause(error)}"
        raise self._error(message, JudgeUnavailable, self.retries + 1)

    @cached_property
    def _client(self) -> "openai.AsyncOpenAI":
        import openai

        headers: dict[str, Any] = {"User-Agent": f"clustrs/{__version__}", "Accept-Encoding": "identity"}
        headers |= dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.Omit())
        return openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=self.url,
            timeout=self.timeout,
            default_headers=headers,
            http_client=bounded_client(self.timeout, trust_env=not is_this_machine(self.url)),
        )

    def _refusal(self, error: "openai.APIStatusError") -> JudgeError:
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

    openai's own time-outs are per read: a server that sends a byte now and then would never meet them. Only plain
    replies are asked for; a server that compresses nevertheless is read as long as it is gzip or deflate.
    """
    import httpx2
    import openai

    async def read(response: httpx2.Response) -> bytes:
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

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            try:
                async with asyncio.timeout(seconds):
                    response = await super().send(request, **{**options, "stream": True})
                    try:
                        content = await read(response)
                    finally:
                        await response.aclose()
            except TimeoutError as error:
                raise httpx2.ReadTimeout(f"no whole reply within {seconds:g} s", request=request) from error
            gone = ("content-encoding", "content-length", "transfer-encoding")
            headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in gone]
            return httpx2.Response(response.status_code, headers=headers, content=content, request=request)

    return BoundedClient(trust_env=trust_env, follow_redirects=False, timeout=seconds)


def check_url(url: object) -> None:
    """Raise a ValueError unless it is a plain http(s) address; one that may hold a password is not repeated."""
    accepted = "(write https://api.openai.com/v1 or http://127.0.0.1:8000/v1)"
    if isinstance(url, str) and any(sign in url for sign in "@?#"):
        raise ValueError(f"url must have no @, ? or #; a key belongs into OPENAI_API_KEY {accepted}")
    parts = URL.fullmatch(url) if isinstance(url, str) else None
    host = (parts["host"] or parts["bracketed"]).removesuffix(".") if parts else ""
    numeric = ":" in host or host.rpartition(".")[2].isdigit()
    if not parts or len(host) > 253 or not 0 < int(parts["port"] or 1) < 2**16 or (numeric and not ip_address(host)):
        raise ValueError(f"url must be the base address of a server, got {validation.excerpt(url)} {accepted}")


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an IPv6 address, or an IPv4 address in any notation (127.0.0.1, 127.1, 2130706433, 0x7f.1), or neither."""
    try:
        return ipaddress.IPv6Address(host) if ":" in host else ipaddress.IPv4Address(socket.inet_aton(host))
    except (ValueError, OSError):
        return None


def is_this_machine(url: str) -> bool:
    """Check whether an address belongs to this machine, by name (its own, or one for the loopback) or by number."""
    host = (urlsplit(url).hostname or "").removesuffix(".").lower()
    own = socket.gethostname().removesuffix(".").lower()
    if host in (*LOCAL_NAMES, own, own.partition(".")[0]) or host.endswith(".localhost"):
        return True
    address = ip_address(host)
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


@dataclass(frozen=True)
class JudgeSummary:
    """Number of scores that were given now, were there already, and failed."""

    judged: int
    reused: int
    failed: int


def judge_run(
    folder: Path,
    judge: Judge,
    rounds: int = 1,
    concurrency: int = 4,
    progress: bool = True,
    confirm: Callable[[int], bool] | None = None,
) -> JudgeSummary:
    """Judge every distinct answer of a run; scores that are there already are kept.

    It can be stopped at any time and called again. An answer that gets no score counts as failed, never as 0, and is
    tried again by the next call.

    Args:
        folder: The folder of the run.
        judge: The judge.
        rounds: How often each answer is judged; results average over the rounds.
        concurrency: Requests at a time.
        progress: Show a progress bar.
        confirm: Called with the number of calls if they are more than ten; False stops before the first one.

    Returns:
        How many scores were given, reused and failed.

    Raises:
        ValueError: The run cannot be read or needs no judge, or the calls were not confirmed.
        JudgeRefused: The judge refuses every answer (bad key, unknown model) or cannot be reached.
    """
    from tqdm import tqdm

    validation.integer("rounds", rounds, 1)
    validation.integer("concurrency", concurrency, 1)
    folder = Path(folder)
    path, run = folder / "verdicts.jsonl", f"run {str(folder)!r}"
    if not (folder / "answers.jsonl").is_file():
        raise ValueError(f"{str(folder)!r} is not a run: there is no answers.jsonl in it")
    config = read_config(folder)
    if config.get("judged") is False:
        raise ValueError(f"{run}: the task {config.get('task')!r} scores its answers itself, they need no judge")
    answers: dict[Pair, Pair] = {}  # question and expected answer by the question's id and the text to judge
    record = None
    for record in read_answers(folder):
        if record.text is not None and record.score is None:
            answers.setdefault((record.item, record.text), (record.question, record.answer))
    if record is None:
        raise ValueError(f"{run} has no answers yet")
    failed = streak = unavailable = 0
    try:
        with locked(path.with_suffix(".lock"), repr(str(path))), path.open("a+b") as file:
            drop_torn_line(file)
            marked = {
                (verdict.item, verdict.text, verdict.round)
                for verdict in stored_verdicts(path)
                if verdict.judge == judge.model and verdict.score is not None
            }
            wanted = [
                VerdictRecord(item=item, text=text, judge=judge.model, round=number, score=None, error=None)
                for number in range(rounds)
                for item, text in answers
                if (item, text, number) not in marked
            ]
            total, reused = rounds * len(answers), rounds * len(answers) - len(wanted)
            if len(wanted) > UNCONFIRMED_CALLS and confirm is not None and not confirm(len(wanted)):
                raise ValueError(f"{len(wanted)} calls to {judge.model} were not confirmed: nothing was asked")
            bar = tqdm(total=total, initial=reused, unit="score", disable=not progress, dynamic_ncols=True)
            with bar, closing(_outcomes(judge, wanted, answers, concurrency)) as results:
                for verdict, outcome in results:
                    error, score = (str(outcome), None) if isinstance(outcome, JudgeError) else (None, outcome)
                    file.write(encode_record(msgspec.structs.replace(verdict, score=score, error=error)))
                    file.flush()
                    bar.update()
                    streak = 0 if error is None else streak + 1
                    unavailable = unavailable + 1 if isinstance(outcome, JudgeUnavailable) else 0
                    if error is not None:
                        failed += 1
                        bar.set_postfix(failed=failed)
                        if progress and failed == 1:
                            bar.write(f"no score for {verdict.item}: {error}", file=sys.stderr)
                    if unavailable >= UNAVAILABLE_IN_A_ROW or streak >= FAILED_IN_A_ROW:
                        reason = f"{streak} answers in a row without a score; the last: {outcome}"
                        raise JudgeRefused(f"stopped after {reason}")
    except OSError as failure:
        raise ValueError(f"{str(path)!r} cannot be written: {failure.strerror}") from None
    return JudgeSummary(len(wanted) - failed, reused, failed)


def _outcomes(
    judge: Judge, wanted: list[VerdictRecord], answers: Mapping[Pair, Pair], concurrency: int
) -> Generator[tuple[VerdictRecord, float | JudgeError], None, None]:
    """Yield scores or errors as they come in; requests under way end with the generator."""
    todo = iter(wanted)
    results: SimpleQueue[tuple[VerdictRecord, float | Exception]] = SimpleQueue()

    async def work() -> None:
        for verdict in todo:
            try:
                question, answer = answers[verdict.item, verdict.text]
                results.put((verdict, await judge.ask(question, answer, verdict.text)))
            except Exception as error:  # whatever it is, it must reach the thread that waits for this verdict
                results.put((verdict, error))

    workers = [asyncio.run_coroutine_threadsafe(work(), event_loop()) for _ in range(min(concurrency, len(wanted)))]
    try:
        for _ in wanted:
            verdict, outcome = results.get()
            if isinstance(outcome, JudgeRefused) or not isinstance(outcome, float | JudgeError):
                raise outcome
            yield verdict, outcome
    finally:
        for worker in workers:
            worker.cancel()
