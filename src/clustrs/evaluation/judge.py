"""A language model that marks answers, behind any server that speaks the OpenAI chat protocol."""

import json
import math
import random
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from clustrs import __version__

LONGEST_PAUSE = 60.0
"""Seconds between two tries, unless the server asks for more."""
LONGEST_REQUESTED_PAUSE = 300.0
"""Seconds; a server that asks for more (a spent daily quota) is not waited for."""
LARGEST_REPLY = 4_000_000
LONGEST_LINE = 300
CONCERNS_ALL = (401, 402, 404)
"""Bad key, no credit left, no such address or model: whatever is asked, the reply will be the same."""

INSTRUCTION = """\
You are marking answers to questions about images that you cannot see.
Hold each prediction against the ground truth, and against nothing else.
Where the ground truth has AND, full marks need every part; where it has OR, one of the parts is enough.
The mark is one of 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0:
0.0 is entirely wrong, 1.0 is entirely right, and what lies between is partly right.
Fill in the mark that is missing at the end of the last row. Reply with that number and nothing else."""

TWO_ROOTS = ("Which values of x solve the equation?", "-1 AND -5")
MEME = (
    "What is the joke in this meme?",
    "It mocks two countries whose names promise the wrong thing: Iceland is full of green meadows, and Greenland lies "
    "under ice. Whoever posted it claims to have lost their trust in others, since not even these names are true.",
)
EXAMPLES = (
    (*TWO_ROOTS, "x = 3", "0.0"),
    (*TWO_ROOTS, "x is -1", "0.5"),
    (*TWO_ROOTS, "x is -5", "0.5"),
    (*TWO_ROOTS, "x may be -5 or 5", "0.5"),
    (*TWO_ROOTS, "either x = -1 or x = -5", "1.0"),
    (*MEME, "It is about Iceland and Greenland: the one has little ice, and the other is hardly green.", "0.4"),
    (
        *MEME,
        "It plays on the fact that Iceland is green while Greenland is covered with ice. As the names say the "
        "opposite of what one finds there, the author jokes that nobody can be trusted any more.",
        "1.0",
    ),
)
NUMBER = re.compile(r"[-+]?(?:\d+(?:[.,]\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class JudgeError(ValueError):
    """The judge gave no mark: why, in one line and without the key."""


class JudgeRefused(JudgeError):
    """As `JudgeError`, for a reason that holds for every other answer too."""


class Hiccup(Exception):
    """One try went wrong, and another may not. `wait` is how long the server asks for, in seconds."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class NoRedirects(HTTPRedirectHandler):
    """The key goes to the server that the user named, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True)
class Judge:
    """A judge: its model's name, the server's base address (as in http://127.0.0.1:8000/v1), the key if it needs one.

    `timeout` in seconds, for each try; `retries` after the first try; `backoff` is the first pause in seconds, which
    doubles from try to try. The key is sent to the server and appears nowhere else.
    """

    model: str
    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 60
    retries: int = 5
    backoff: float = 1.0
    _opener: OpenerDirector = field(init=False, repr=False, compare=False)

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
        object.__setattr__(self, "_opener", build_opener(NoRedirects))

    def score(self, question: str, answer: str, prediction: str, stop: threading.Event | None = None) -> float:
        """The mark from 0 to 1; a `JudgeError` when there is none after the last try, or `stop` is set meanwhile."""
        stop = stop or threading.Event()
        message = {"role": "user", "content": prompt(question, answer, prediction)}
        body = json.dumps({"model": self.model, "messages": [message], "temperature": 0}).encode()
        for tried in range(self.retries + 1):
            try:
                return read_score(self._reply(body))
            except Hiccup as hiccup:
                problem = hiccup
            if tried < self.retries and stop.wait(self._pause(tried, problem)):
                raise JudgeError("stopped before the judge had answered")
        raise self._error(str(problem), f" (tries: {self.retries + 1})")

    def _reply(self, body: bytes) -> str:
        """What the judge says, in one try."""
        headers = {"Content-Type": "application/json", "User-Agent": f"clustrs/{__version__}"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = Request(f"{self.url}/chat/completions", data=body, headers=headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                raw = response.read(LARGEST_REPLY)
        except HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise Hiccup(f"no reply from {self.url}: {str(reason) or type(reason).__name__}") from None
        try:
            content = json.loads(raw)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise Hiccup(f"the reply is no chat completion: {raw.decode(errors='replace')}") from None
        if not isinstance(content, str):
            raise Hiccup("the reply has no text")
        return content

    def _refusal(self, error: HTTPError) -> Hiccup | JudgeError:
        """What an HTTP status means: worth another try, or not."""
        with error:
            try:
                said = server_message(error.read(LARGEST_REPLY))
            except (OSError, HTTPException):
                said = ""
        text = f"the server says {error.code}: {said or error.reason}"
        wait = seconds_to_wait(error.headers.get("Retry-After"))
        if error.code in (408, 429) or error.code >= 500:
            if wait is not None and wait > LONGEST_REQUESTED_PAUSE:
                return self._error(text, f" (and to wait for {wait:.0f} s)")
            return Hiccup(text, wait)
        if 300 <= error.code < 400:
            return self._error(f"{text} (it points to {error.headers.get('Location')})", kind=JudgeRefused)
        return self._error(text, kind=JudgeRefused if error.code in CONCERNS_ALL else JudgeError)

    def _pause(self, tried: int, problem: Hiccup) -> float:
        """Seconds until the next try: longer from try to try, and not the same for those that failed together."""
        if problem.wait is not None:
            return problem.wait + random.uniform(0, self.backoff)
        return min(LONGEST_PAUSE, self.backoff * 2.0 ** min(tried, 30)) * random.uniform(0.5, 1.0)

    def _error(self, text: str, end: str = "", kind: type[JudgeError] = JudgeError) -> JudgeError:
        """An error of one short line, from which the key is taken out before anything is cut off."""
        if self.key:
            for form in (self.key, self.key.replace("/", r"\/"), quote(self.key, safe="")):
                text = text.replace(form, "***")
        line = " ".join(text.split())
        return kind((line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}...") + end)


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


def prompt(question: str, answer: str, prediction: str) -> str:
    """What the judge reads: the instruction, worked examples in a table, and the row to be completed."""
    expected = answer.replace("<AND>", " AND ").replace("<OR>", " OR ")
    table = ["Question | Ground truth | Prediction | Correctness", "--- | --- | --- | ---"]
    table += [" | ".join(example) for example in EXAMPLES]
    table.append(" | ".join([cell(question), cell(expected), cell(prediction), ""]).rstrip())
    return "\n".join([INSTRUCTION, "", *table])


def cell(text: str) -> str:
    """One line without the sign that parts the columns; a broken bar looks much the same."""
    return " ".join(text.replace("|", "¦").split())


def read_score(reply: str) -> float:
    """The first number of a reply, after whatever the judge thought aloud; it must lie in [0, 1]."""
    said = reply.rpartition("</think>")[2].partition("<think>")[0]
    number = NUMBER.search(said)
    score = float(number[0].replace(",", ".")) if number else math.nan
    if not 0 <= score <= 1:
        raise Hiccup(f"no number from 0 to 1 comes first in the reply: {said}")
    return abs(score)


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
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
