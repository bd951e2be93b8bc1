"""A contact sheet: one image, clean and spoiled in every way and at every level there is."""

from PIL import Image, ImageDraw, ImageFont

from clustrs.images.corruptions.corruption import IMAGENET_C_LEVELS, PAPER_LEVELS, Corruption
from clustrs.images.corruptions.imagenet_c import GET_PHOTOGRAPHS, frost_photographs

LARGEST = 1024
"""A image with a longer side than this is scaled down first: otherwise a photograph would take minutes."""
CELL = 208
GAP = 12
LINE = 24
NAMES = 168
INK, PALE, PAPER = "#1a1a1a", "#5f5f5f", "#ffffff"
SECTIONS = {
    "The paper's corruptions": PAPER_LEVELS,
    "ImageNet-C, severities 1 to 5 (their full names begin with imagenet_c/)": IMAGENET_C_LEVELS,
}
COLUMNS = max(len(levels) for section in SECTIONS.values() for levels in section.values())


def contact_sheet(image: Image.Image, image_id: str = "", seed: int = 0) -> Image.Image:
    """The clean source, the corruptions of the paper and those of ImageNet-C: a row each, a cell a level."""
    notes = [image_id, f"seed {seed}", f"{image.width} x {image.height} pixels"]
    if max(image.size) > LARGEST:
        image = image.resize(fitted(image.size, LARGEST), Image.Resampling.LANCZOS)
        notes.append(f"scaled down to {image.width} x {image.height} for this sheet")
    missing = [] if frost_photographs() else ["imagenet_c/frost"]
    drawn = sum(len(section) for section in SECTIONS.values()) - len(missing)
    row = fitted(image.size, CELL)[1] + LINE + GAP
    top_row = max(row, len(notes) * LINE + GAP)
    height = 2 * GAP + top_row + drawn * row + 2 * len(SECTIONS) * LINE + len(missing) * (LINE + GAP)
    sheet = Image.new("RGB", (GAP + NAMES + COLUMNS * (CELL + GAP), height), PAPER)
    draw = ImageDraw.Draw(sheet)
    large, normal, small = (ImageFont.load_default(size) for size in (20, 17, 15))

    def cell(source: Image.Image, column: int, top: int, caption: str) -> None:
        left = GAP + NAMES + column * (CELL + GAP)
        shown = source.resize(fitted(source.size, CELL), resampling(source))
        sheet.paste(shown, (left, top))
        draw.text((left, top + shown.height + 3), caption, INK, small)

    top = GAP
    draw.text((GAP, top), "clean", INK, normal)
    cell(image, 0, top, "")
    draw.text((GAP + NAMES + CELL + GAP, top), "\n".join(filter(None, notes)), PALE, small, spacing=8)
    top += top_row
    for title, section in SECTIONS.items():
        draw.text((GAP, top + 2), title, INK, large)
        draw.line((GAP, top + LINE + 6, sheet.width - GAP, top + LINE + 6), PALE)
        top += 2 * LINE
        for name, levels in section.items():
            draw.text((GAP, top), name.rpartition("/")[2], INK, normal)
            if name in missing:
                draw.text((GAP + NAMES, top), f"needs photographs: {GET_PHOTOGRAPHS}", PALE, normal)
                top += LINE + GAP
                continue
            for column, level in enumerate(levels):
                corruption = Corruption(name, level)
                cell(corruption.apply(image, image_id, seed), column, top, str(corruption).partition(":")[2])
            top += row
    return sheet


def fitted(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The size of the same shape (nearly, where it is very long) whose longer side is `side`."""
    scale = side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def resampling(image: Image.Image) -> Image.Resampling:
    """Small images are enlarged to visible pixels, large ones are averaged."""
    return Image.Resampling.NEAREST if max(image.size) < CELL else Image.Resampling.LANCZOS
