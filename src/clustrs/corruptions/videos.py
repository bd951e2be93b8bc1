"""Videos: a few evenly spaced frames of a file, with one clear error for whatever is wrong with it."""

import os
from pathlib import Path
from typing import Any

from PIL import Image

from clustrs.corruptions.images import check_size, first_sentence
from clustrs.validation import open_regular

SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi")
MAX_FRAMES = 100_000  # that a file may have: all up to the last one are decoded
MAX_SECONDS = 3600.0
MOST = 64  # frames that are taken
MOST_PIXELS = 2**28  # of all frames that are taken; while they are searched, twice as many are in memory
DEMUXERS = "mov,matroska,avi"  # ffmpeg has others that open further files


def is_video(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() in SUFFIXES


def open_video(path: str | os.PathLike[str], frames: int = 8) -> list[Image.Image]:
    """Open a video file, and return evenly spaced frames of it in RGB, the first and the last among them.

    Args:
        path: a regular file that PyAV can decode, of at most `MAX_SECONDS` and `MAX_FRAMES`.
        frames: how many frames, from 1 to `MOST`, of at most `MOST_PIXELS`; all of them if there are fewer.

    Raises:
        ValueError: there is no such file, it is not a video, it is damaged, too large or too long, or PyAV is missing.
    """
    where = f"video {str(path)!r}"
    if not 1 <= frames <= MOST:
        raise ValueError(f"frames must be an integer from 1 to {MOST}, got {frames}")
    if not os.path.isfile(path):
        raise ValueError(f"{where}: {'not a file' if os.path.exists(path) else 'there is no such file'}")
    try:
        import av
    except ImportError:
        raise ValueError(f"{where}: videos need PyAV (pip install av)") from None
    try:
        options = {"format_whitelist": DEMUXERS}
        with open_regular(path) as opened, av.open(opened, options=options, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise ValueError(f"{where} could not be read: it has no pictures")
            return _evenly_spaced(where, container, frames)
    except av.ArgumentError as error:
        raise ValueError(f"{where} could not be read: it is none of {', '.join(SUFFIXES)}") from error
    except (av.FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or first_sentence(error)
        raise ValueError(f"{where} could not be read: {reason}") from error


def _evenly_spaced(where: str, container: Any, count: int) -> list[Image.Image]:
    """Decode all frames once. Of those seen so far every `step`-th is held, at most twice as many as are wanted: what
    the file says of its length is not trusted."""
    stream = container.streams.video[0]
    check_size(where, (stream.width or 1, stream.height or 1))
    held: list[Image.Image] = []
    step, last, number = 1, None, -1
    for number, frame in enumerate(container.decode(stream)):
        if number >= MAX_FRAMES:
            raise ValueError(f"{where} could not be read: it has more than {MAX_FRAMES:,} frames")
        if frame.time is not None and frame.time > MAX_SECONDS:
            raise ValueError(f"{where} could not be read: it is longer than {MAX_SECONDS:g} seconds")
        check_size(where, (frame.width, frame.height))
        if count * frame.width * frame.height > MOST_PIXELS:
            shown = f"{count} frames of {frame.width} x {frame.height}"
            raise ValueError(f"{where} could not be read: {shown} have more than {MOST_PIXELS:,} pixels")
        last = frame
        if number % step == 0:
            held.append(frame.to_image())
            if len(held) > 2 * count:
                held, step = held[::2], 2 * step
    if last is None:
        raise ValueError(f"{where} could not be read: it has no pictures")
    if number % step:
        held.append(last.to_image())
    count = min(count, len(held))
    return [held[round(i * (len(held) - 1) / max(1, count - 1))] for i in range(count)]
