"""Judge answers with a language model behind any server that speaks the OpenAI chat protocol.

The server is not trusted: a reply is bounded in time and in bytes, the key goes to no other server, and it is removed
from whatever the server says. An answer under test cannot pose as a part of the prompt's table, and reading a reply
takes time linear in its length. The verdicts of a run are stored in its `verdicts.jsonl`.
"""

import asyncio
import base64
import html
import json
import math
import os
import re
import socket
import sys
import threading
import unicodedata
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from clustrs import __version__, validation
from clustrs.evaluation.results import Pair, stored_verdicts
from clustrs.evaluation.store import VerdictRecord, drop_torn_line, encode_record, locked, read_config, some_answers

if TYPE_CHECKING:
    import httpx2
    import openai

LARGEST_REPLY = 4_000_000  # bytes of a reply, as sent and decoded; anything longer is not a score
LONGEST_LINE = 300  # characters of an error message
REPLY_PAUSE = 0.5  # seconds before a reply that is not a score is asked for again; doubles from try to try, up to 8 s
REFUSES_ALL = (401, 402, 404)  # what all requests would get: bad key, no credit, unknown address or model
UNCONFIRMED_CALLS = 10  # number of calls that need no confirmation
UNAVAILABLE_IN_A_ROW = 3  # answers in a row for which the server did nothing, after which judging stops
FAILED_IN_A_ROW = 20  # answers in a row without a score, for whatever reason, after which judging stops
LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
URL = re.compile(
    rf"https?://(?:(?P<host>{LABEL}(?:\.{LABEL})*\.?)|\[(?P<bracketed>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\])"
    r"(?::(?P<port>[0-9]{0,9}))?(?:/[!-~]*)?",
    re.IGNORECASE,
)
LONGEST_SCORE = 200  # characters of a line that may be a score
NUMBER = r"[-+]?(?:[0-9]+(?:[.,][0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
DECORATION = r"[\s*_`|]*"
BARE = re.compile(rf"{DECORATION}(?:correctness\s*[:=|]?{DECORATION})?({NUMBER})\.?{DECORATION}", re.IGNORECASE)
"""A reply, or its last line, that is a score: "0.5", "**0.5**", "Correctness: 0.5"."""
LABELLED = re.compile(r"correctness\s*[:=]", re.IGNORECASE)
THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
SECRET_PIECE = 8  # characters of a secret that are removed even alone: servers like to repeat the beginning of a key
CODE = re.compile(r"\\+(?:u\{?0*|x)([0-9a-f]{2})\}?", re.IGNORECASE)  # an escape of Python, JSON or JavaScript
Request = tuple[str, str, int]  # id of a question, the text to judge, and the round
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
    with growing pauses, or after the time that the server asks for, at most two minutes. No redirect is followed, and
    only https goes through a proxy, so that the key reaches the named server alone.

    Args:
        model: Name of the judge's model.
        url: Base address of the server, for example ``http://127.0.0.1:8000/v1``.
        key: API key, if the server needs one. It is sent to the server and written nowhere.
        timeout: Seconds for each try, from the connection to the last byte.
        retries: Further requests for an answer, after a failure or a reply that is not a score.

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
                raise self._error(JudgeError, wrong, self.retries + 1)
            await asyncio.sleep(pause)
            pause = min(8.0, 2 * pause)

    async def _request(self, content: str, retries: int) -> Any:
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
        except (openai.APIConnectionError, OSError) as error:
            message = f"no reply from {self.url}: {root_cause(error)}"
        raise self._error(JudgeUnavailable, message, self.retries + 1)

    @cached_property
    def _client(self) -> "openai.AsyncOpenAI":
        import openai

        headers: dict[str, Any] = {"User-Agent": f"clustrs/{__version__}", "Accept-Encoding": "identity"}
        return openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=self.url,
            timeout=self.timeout,
            default_headers=headers | dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.Omit()),
            http_client=bounded_client(self.timeout, trust_env=self.url.lower().startswith("https")),
        )

    def _refusal(self, error: "openai.APIStatusError") -> JudgeError:
        status, headers, said = error.status_code, error.response.headers, error.body
        for key in ("error", "message", "detail"):
            said = said.get(key) or said if isinstance(said, dict) else said
        said = said if isinstance(said, str) else json.dumps(said)
        text, tries = f"the server says {status}: {said or error.response.reason_phrase}", 1
        kind = JudgeRefused if status in REFUSES_ALL or status < 400 else JudgeError
        if status < 400:
            text += f" (it points to {headers.get('Location')})"
        elif status in (403, 408, 409, 429) or status >= 500:
            kind, tries = JudgeUnavailable, int(error.request.headers.get("x-stainless-retry-count", 0)) + 1
            text += f" (Retry-After: {headers['Retry-After']})" if "Retry-After" in headers else ""
        return self._error(kind, text, tries)

    def _error(self, kind: type[JudgeError], text: str, tries: int) -> JudgeError:
        """Make an error of one short line; the key is removed before anything is cut off."""
        line = redact(" ".join(text[: 20 * LONGEST_LINE].split()), self.key)
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
            headers = httpx2.Headers(response.headers)
            headers.pop("content-encoding", None)
            return httpx2.Response(response.status_code, headers=headers, content=content, request=request)

    async def read(response: httpx2.Response) -> bytes:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", "gzip", "deflate"):
            raise httpx2.DecodingError(f"the reply has an encoding that was not asked for: {encoding[:40]}")
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if max(len(body), response.num_bytes_downloaded) > LARGEST_REPLY:
                raise httpx2.ReadError(f"the reply is longer than {LARGEST_REPLY} bytes")
        return bytes(body)

    return BoundedClient(trust_env=trust_env, follow_redirects=False, timeout=seconds)


def check_url(url: object) -> None:
    """Raise a ValueError unless it is a plain http(s) address; one that may hold a password is not repeated."""
    accepted = "(write https://api.openai.com/v1 or http://127.0.0.1:8000/v1)"
    if isinstance(url, str) and any(sign in url for sign in "@?#"):
        raise ValueError(f"url must have no @, ? or #; a key belongs into OPENAI_API_KEY {accepted}")
    parts = URL.fullmatch(url) if isinstance(url, str) else None
    host = (parts["host"] or parts["bracketed"]).removesuffix(".") if parts else ""
    numeric = ":" in host or host.rpartition(".")[2].isdigit()
    if not parts or len(host) > 253 or not 0 < int(parts["port"] or 1) < 2**16 or (numeric and not is_address(host)):
        raise ValueError(f"url must be the base address of a server, got {validation.excerpt(url)} {accepted}")


def is_address(host: str) -> bool:
    """Check for an IPv6 address, or an IPv4 address in any notation (127.0.0.1, 127.1, 2130706433, 0x7f.1)."""
    try:
        return bool(socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST))
    except OSError:
        return False


def root_cause(error: BaseException) -> str:
    """Return what the system said, below the layers of libraries that only say that something failed."""
    below: BaseException | None = error
    while below is not None:
        error = below
        below = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    known = isinstance(error, ConnectionError) and error.errno
    return os.strerror(known) if known else str(error) or type(error).__name__


def prompt(question: str, answer: str, prediction: str) -> str:
    """Compose what the judge reads: the instruction, worked examples in a table, and the row to complete."""
    expected = answer.replace("<AND>", " AND ").replace("<OR>", " OR ")
    opening = Path(__file__).with_name("judge_prompt.txt").read_text(encoding="utf-8")
    return f"{opening}{_column(question)} | {_column(expected)} | ⟦{_column(prediction)}⟧ |"


def _column(text: str) -> str:
    """Make one line of a text, without control characters and the signs that part columns and enclose predictions."""
    text = " ".join(text.replace("|", "¦").replace("⟦", "[[").replace("⟧", "]]").split())
    return "".join("\ufffd" if unicodedata.category(sign) in ("Cc", "Cf", "Cs") else sign for sign in text)


def read_score(reply: str) -> float | None:
    """Read the score of a reply that is a number, or ends in the only line "Correctness: 0.5"; None if it does not."""
    said = without_thinking(reply).strip()
    match = BARE.fullmatch(said) if len(said) <= LONGEST_SCORE else None
    if match is None and len(LABELLED.findall(said)) == 1:
        last = said.splitlines()[-1]
        match = BARE.fullmatch(last) if len(last) <= LONGEST_SCORE and LABELLED.search(last) else None
    score = float(match[1].replace(",", ".")) if match else math.nan
    return abs(score) if 0 <= score <= 1 else None


def without_thinking(reply: str) -> str:
    """Drop <think>...</think>, also where the end is missing or the beginning is."""
    parts: list[str] = []
    position, thinking = 0, False
    for tag in THINK_TAG.finditer(reply):
        if tag[1]:
            if not thinking:
                parts.clear()
            position, thinking = tag.end(), False
        elif not thinking:
            parts.append(reply[position : tag.start()])
            thinking = True
    return "".join(parts if thinking else [*parts, reply[position:]])


def redact(text: str, secret: str | None) -> str:
    """Replace words that hold a secret, or a part of it, by ***: as it is, quoted, escaped, in base64 or in hex."""
    if not secret:
        return text
    encoded = {secret.encode().hex()}
    for shift in range(3):  # where a group of three bytes begins depends on what is encoded before the secret
        inner = base64.b64encode(bytes(shift) + secret.encode()).decode().rstrip("=")[shift + bool(shift) : -1]
        encoded |= {inner, inner.translate(str.maketrans("+/", "-_"))}
    sizes = dict.fromkeys((form for form in encoded if len(form) >= SECRET_PIECE), 2 * SECRET_PIECE)
    sizes |= dict.fromkeys((secret, _unescape(secret)), SECRET_PIECE)
    pieces = {form[i : i + n].lower() for form, n in sizes.items() for i in range(max(1, len(form) - n + 1))}

    def shown(word: str) -> str:
        forms = word.lower(), _unescape(word).lower()
        return "***" if any(piece in form for form in forms for piece in pieces) else word

    return " ".join(map(shown, text.split(" ")))


def _unescape(text: str) -> str:
    """Undo escapes of URLs, HTML, Python and JSON, also where they are escaped themselves."""
    before = None
    while before != text:
        before, text = text, html.unescape(unquote(CODE.sub(lambda code: chr(int(code[1], 16)), text)))
    return text.replace("\\", "")


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
    answers: dict[Pair, Pair] = {}  # question and expected answer by the question's id and the text to judge
    for record in some_answers(folder):
        if record.text is not None and record.score is None:
            answers.setdefault((record.item, record.text), (record.question, record.answer))
    path, config = folder / "verdicts.jsonl", read_config(folder)
    if config.get("judged") is False:
        task = config.get("task")
        raise ValueError(f"run {str(folder)!r}: the task {task!r} scores its answers itself, they need no judge")
    failed = streak = unavailable = 0
    try:
        with locked(path.with_suffix(".lock"), repr(str(path))), path.open("ab") as file:
            drop_torn_line(path)
            done = {
                (verdict.item, verdict.text, verdict.round)
                for verdict in stored_verdicts(path)
                if verdict.judge == judge.model and verdict.score is not None
            }
            asked = [(*pair, number) for number in range(rounds) for pair in answers]
            wanted = [one for one in asked if one not in done]
            reused = len(asked) - len(wanted)
            if len(wanted) > UNCONFIRMED_CALLS and confirm is not None and not confirm(len(wanted)):
                raise ValueError(f"{len(wanted)} calls to {judge.model} were not confirmed: nothing was asked")
            bar = tqdm(total=len(asked), initial=reused, unit="score", disable=not progress, dynamic_ncols=True)
            with bar, closing(_outcomes(judge, wanted, answers, concurrency)) as results:
                for (item, text, number), outcome in results:
                    error, score = (str(outcome), None) if isinstance(outcome, JudgeError) else (None, outcome)
                    verdict = VerdictRecord(item, text, judge.model, number, score, error)
                    file.write(encode_record(verdict))
                    file.flush()
                    bar.update()
                    streak = 0 if error is None else streak + 1
                    unavailable = unavailable + 1 if isinstance(outcome, JudgeUnavailable) else 0
                    if error is not None:
                        failed += 1
                        bar.set_postfix(failed=failed)
                        if progress and failed == 1:
                            bar.write(f"no score for {item}: {error}", file=sys.stderr)
                    if unavailable >= UNAVAILABLE_IN_A_ROW or streak >= FAILED_IN_A_ROW:
                        raise JudgeRefused(
                            f"stopped after {streak} answers in a row without a score; the last: {error}"
                        )
    except OSError as failure:
        raise ValueError(f"{str(path)!r} cannot be written: {failure.strerror}") from None
    return JudgeSummary(len(wanted) - failed, reused, failed)


def _outcomes(
    judge: Judge, wanted: list[Request], answers: Mapping[Pair, Pair], concurrency: int
) -> Generator[tuple[Request, float | JudgeError], None, None]:
    """Yield scores or errors as they come in; requests under way end with the generator."""
    todo = iter(wanted)
    results: SimpleQueue[tuple[Request, float | Exception]] = SimpleQueue()

    async def work() -> None:
        for item, text, number in todo:
            outcome: float | Exception
            try:
                outcome = await judge.ask(*answers[item, text], text)
            except Exception as error:  # whatever it is, it must reach the thread that waits for this verdict
                outcome = error
            results.put(((item, text, number), outcome))

    workers = [asyncio.run_coroutine_threadsafe(work(), event_loop()) for _ in range(min(concurrency, len(wanted)))]
    try:
        for _ in wanted:
            request, outcome = results.get()
            if isinstance(outcome, JudgeRefused) or not isinstance(outcome, float | JudgeError):
                raise outcome
            yield request, outcome
    finally:
        for worker in workers:
            worker.cancel()
