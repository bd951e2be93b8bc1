"""`clustrs corrupt`: an image as an evaluation would corrupt it."""

from dataclasses import dataclass
from pathlib import Path

from clustrs.cli import values
from clustrs.cli.arguments import option, positional
from clustrs.cli.commands import command
from clustrs.cli.outputs import check_file
from clustrs.embedded import image_path


@dataclass(frozen=True, kw_only=True)
class CorruptOptions:
    """The options of `clustrs corrupt`."""

    image: str = positional("an image file, or sample:NAME (see clustrs samples)", "IMAGE")
    corrupt: str | None = option(None, "for example gaussian:0.5; see clustrs corruptions", metavar="NAME:LEVEL")
    seed: int = option(0, "seed of what is random", low=0, high=values.LARGEST_SEED)
    contact_sheet: bool = option(False, "draw all corruptions at all levels on a contact sheet")
    output: Path = option(..., "the image to write", "-o", "--output", metavar="FILE")


@command("corrupt", panel="Try")
def run_corrupt(options: CorruptOptions) -> None:
    """Corrupt an image as an evaluation would, or show all corruptions."""
    from clustrs.corruptions import Corruption
    from clustrs.corruptions.contact_sheet import contact_sheet
    from clustrs.corruptions.images import open_image

    if options.contact_sheet == bool(options.corrupt):
        raise ValueError("give --corrupt NAME:LEVEL for one image, or --contact-sheet for all corruptions")
    corruption = Corruption.parse(options.corrupt) if options.corrupt else None
    check_file("--output", options.output)
    path = image_path(options.image)
    image = open_image(path)
    result = (
        corruption.apply(image, path.name, options.seed)
        if corruption
        else contact_sheet(image, path.name, options.seed)
    )
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result.save(options.output)
    except (ValueError, OSError) as error:
        raise ValueError(f"--output {str(options.output)!r}: {getattr(error, 'strerror', None) or error}") from None
    print(options.output)
