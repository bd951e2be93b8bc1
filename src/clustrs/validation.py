"""Checks of parameters, values as users type them, options that several rooms share, and files read and written safely.

Nothing here needs torch.
"""

import errno
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from io import BufferedReader
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

Scope = Literal["image", "crop", "video", "frame"]
"""One budget for each image or video, for each crop, for each frame, or for all images of a prompt (frames)."""
Crops = Literal["all", "base"]  # all crops of an image, or the base crop alone
Positions = Literal["auto", "compact", "original"]  # of kept tokens: what fits the family, without gaps, as they were
Attention = Literal["auto", "plain", "proportional"]  # each counts once, or for all it stands for (auto: if possible)
Deepstack = Literal["raw", "shrunk"]  # deepstack features of kept tokens: as they are, or shrunk as the tokens are
PromptTemplate = Literal["checkpoint", "vicuna_v1"]  # the model's own chat template, or LLaVA-1.5's and system line
ImagePadding = Literal["checkpoint", "square"]  # of images that are not square: the processor's, or with the mean color
EngineName = Literal["local", "ray"]  # engine that runs an evaluation
CHOICES = {"scope": Scope, "crops": Crops, "positions": Positions, "attention": Attention, "deepstack": Deepstack}
"""Options of attaching a method, with their accepted values."""
Dtype = Literal["auto", "float32", "float16", "bfloat16"]  # type of a model's weights; "auto" is the checkpoint's own


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for loading a model. Configs and commands that load one derive from this, so all have the same fields."""

    device: str | None = None
    """cpu, cuda, cuda:1, mps ...; None is an accelerator if there is one."""
    dtype: Dtype | None = None
    """Type of the weights; None is float32 on a CPU, the checkpoint's own elsewhere."""
    attn: str | None = None
    """Attention implementation; None is transformers' choice."""
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    device_map: str | None = None

    def load_options(self) -> "LoadOptions":
        """Return these options alone, without the fields of a derived class."""
        return LoadOptions(**{one.name: getattr(self, one.name) for one in fields(LoadOptions)})

    def given(self) -> dict[str, Any]:
        """Return the options that are not at their defaults, by name."""
        return {one.name: value for one in fields(LoadOptions) if (value := getattr(self, one.name)) != one.default}


def is_number(value: Any) -> bool:
    """Tell if a value is a finite number that a float can hold; integers of hundreds of digits are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def excerpt(value: Any) -> str:
    """Show a value in a message: in one line, printable, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check(accepted: bool, name: str, what: str, value: Any, hint: str = "") -> None:
    """Raise a ValueError that says what `name` must be, unless the value is accepted."""
    if not accepted:
        raise ValueError(f"{name} must be {what}, got {value!r}{hint}")


def keep(value: Any) -> None:
    """Check for a count of at least 1 (int), or a fraction in (0, 1] (float)."""
    accepted = is_number(value) and (value >= 1 if isinstance(value, int) else 0 < value <= 1)
    check(accepted, "keep", "a count (an int of at least 1) or a fraction (a float in (0, 1])", value)


def number(name: str, value: Any, low: float, high: float) -> None:
    """Check for a number in [low, high]."""
    check(is_number(value) and low <= value <= high, name, f"a number from {low:g} to {high:g}", value)


def above(name: str, value: Any, low: float) -> None:
    """Check for a number above `low`."""
    check(is_number(value) and value > low, name, f"a number above {low:g}", value)


def integer(name: str, value: Any, low: int) -> None:
    """Check for an integer of at least `low`."""
    accepted = is_number(value) and isinstance(value, int) and value >= low
    check(accepted, name, f"an integer of at least {low}", value)


def choice(name: str, value: Any, options: Iterable[Any]) -> None:
    """Check for one of `options`."""
    options = list(options)
    if not any(value is option or (isinstance(value, str) and value == option) for option in options):
        check(False, name, f"one of {', '.join(map(repr, options))}", value, nearest(value, options))


def interval(name: str, value: Any, low: float, high: float) -> tuple[float, float]:
    """Check for a pair low <= a <= b <= high and return it as a tuple; a list (as JSON has it) is accepted."""
    pair = value if isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value)) else (1, 0)
    hint = f" (write {name}=[{low:g}, {(low + high) / 2:g}])"
    check(low <= pair[0] <= pair[1] <= high, name, f"two numbers {low:g} <= a <= b <= {high:g}", value, hint)
    return float(pair[0]), float(pair[1])


def key_value(text: str, error: str) -> tuple[str, Any]:
    """Parse KEY=VALUE as a user types it, or raise a ValueError that says `error`. A value is JSON, or numbers with
    commas between them (`clip=0,0.5` is `clip=[0,0.5]`), or else a string."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(error)
    numbers = re.fullmatch(r"[-+.\deE\s]+(,[-+.\deE\s]+)+", value, re.ASCII)
    try:
        return key, json.loads(f"[{value}]" if numbers else value)
    except RecursionError:
        raise ValueError(f"{key}={value[:20]}... is nested too deeply") from None
    except ValueError:  # not JSON, or an integer of thousands of digits
        return key, value


def nearest(value: Any, options: Iterable[Any]) -> str:
    """Return ' (did you mean ...?)', or an empty string."""
    close = get_close_matches(str(value).lower(), [str(option) for option in options], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def plain_hint(hint: Any) -> Any:
    """Return a type hint without its `| None`."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) and len(kinds) == 1 else hint


def source_date() -> int | None:
    """Return the seconds since 1970 in the variable SOURCE_DATE_EPOCH, which stands for now, or None."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None:
        return None
    latest = 253402300799  # the last second of the year 9999
    if not re.fullmatch("[0-9]{1,12}", text) or int(text) > latest:
        shown = ascii(text) if len(text) <= 40 else f"{text[:37]!a}..."
        raise ValueError(f"SOURCE_DATE_EPOCH must be whole seconds since 1970, 0 to {latest}, got {shown}")
    return int(text)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read its bytes; an OSError for anything else: a FIFO could block the caller for ever."""
    # Checked before it is opened, since opening a device may do something, and after: it may have been replaced.
    if stat.S_ISREG(os.stat(path).st_mode):
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_text(path: Path, largest: int = sys.maxsize) -> str:
    """Read a text file of at most `largest` bytes; a ValueError names the file."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > largest:
                raise ValueError(f"{str(path)!r} is too large, at most {largest} bytes are read")
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} must be a text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror or type(error).__name__}") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON from a file that may be wrong in any way; NaN, Infinity and a key that occurs twice are refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ValueError(f"the key {excerpt(key)} occurs twice")
        return dict(pairs)

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(decoded, object_pairs_hook=once, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{where}: not JSON ({reason})") from None


def write_whole(path: Path, content: str | Iterable[bytes]) -> None:
    """Write a file so that it is there with all its content or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines([content.encode()] if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
