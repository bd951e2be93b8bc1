"""A contact sheet: one image, clean and with every corruption at every level there is."""

from PIL import Image, ImageDraw, ImageFont

from clustrs.corruptions import Corruption, Group, corruption_rule, list_corruptions
from clustrs.corruptions.imagenet_c import GET_PHOTOGRAPHS, frost_photographs

LARGEST = 1024
"""An image with a longer side than this is scaled down first: otherwise a photograph would take minutes."""
CELL = 208
GAP = 12
LINE = 24
NAMES = 168
INK, PALE, PAPER = "#1a1a1a", "#5f5f5f", "#ffffff"
TITLES: dict[Group, str] = {
    "paper": "The paper's corruptions",
    "imagenet_c": "ImageNet-C, severities 1 to 5 (their full names begin with imagenet_c/)",
    "plugin": "Corruptions of other packages",
}


def sections() -> dict[str, dict[str, tuple[float, ...]]]:
    """All corruptions with their levels, by the title under which they stand."""
    rules = {name: corruption_rule(name) for name in list_corruptions(usable=False)}
    grouped = {
        title: {name: rule.levels for name, rule in rules.items() if rule.group == group}
        for group, title in TITLES.items()
    }
    return {title: section for title, section in grouped.items() if section}


class ContactSheet:
    """A white page that is filled from top to bottom."""

    def __init__(self, columns: int, height: int) -> None:
        self.page = Image.new("RGB", (GAP + NAMES + columns * (CELL + GAP), height), PAPER)
        self.draw = ImageDraw.Draw(self.page)
        self.large, self.normal, self.small = (ImageFont.load_default(size) for size in (20, 17, 15))
        self.top = GAP

    def name(self, text: str) -> None:
        self.draw.text((GAP, self.top), text, INK, self.normal)

    def note(self, column: int, text: str) -> None:
        self.draw.text((GAP + NAMES + column * (CELL + GAP), self.top), text, PALE, self.small, spacing=8)

    def title(self, text: str) -> None:
        """A heading with a line below it."""
        self.draw.text((GAP, self.top + 2), text, INK, self.large)
        line = self.top + LINE + 6
        self.draw.line((GAP, line, self.page.width - GAP, line), PALE)
        self.top += 2 * LINE

    def cell(self, image: Image.Image, column: int, caption: str) -> None:
        left = GAP + NAMES + column * (CELL + GAP)
        shown = image.resize(fitted(image.size, CELL), resampling(image))
        self.page.paste(shown, (left, self.top))
        self.draw.text((left, self.top + shown.height + 3), caption, INK, self.small)


def contact_sheet(image: Image.Image, image_id: str = "", seed: int = 0) -> Image.Image:
    """The clean image, then every corruption that is registered: one row per corruption, one cell per level."""
    notes = [image_id, f"seed {seed}", f"{image.width} x {image.height} pixels"]
    if max(image.size) > LARGEST:
        image = image.resize(fitted(image.size, LARGEST), Image.Resampling.LANCZOS)
        notes.append(f"scaled down to {image.width} x {image.height} for this sheet")
    shown = sections()
    missing = [] if frost_photographs() else ["imagenet_c/frost"]
    row = fitted(image.size, CELL)[1] + LINE + GAP
    top_row = max(row, len(notes) * LINE + GAP)
    rows = sum(map(len, shown.values())) - len(missing)
    height = 2 * GAP + top_row + rows * row + 2 * len(shown) * LINE + len(missing) * (LINE + GAP)
    sheet = ContactSheet(max(len(levels) for section in shown.values() for levels in section.values()), height)
    sheet.name("clean")
    sheet.cell(image, 0, "")
    sheet.note(1, "\n".join(filter(None, notes)))
    sheet.top += top_row
    for title, section in shown.items():
        sheet.title(title)
        for name, levels in section.items():
            sheet.name(name.removeprefix("imagenet_c/"))
            if name in missing:
                text = f"needs photographs: {GET_PHOTOGRAPHS}"
                sheet.draw.text((GAP + NAMES, sheet.top), text, PALE, sheet.normal)
                sheet.top += LINE + GAP
                continue
            for column, level in enumerate(levels):
                corruption = Corruption(name, level)
                sheet.cell(corruption.apply(image, image_id, seed), column, corruption.level_text)
            sheet.top += row
    return sheet.page


def fitted(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The size of the same shape (nearly, where it is very long) whose longer side is `side`."""
    scale = side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def resampling(image: Image.Image) -> Image.Resampling:
    """Small images are enlarged to visible pixels, large ones are averaged."""
    return Image.Resampling.NEAREST if max(image.size) < CELL else Image.Resampling.LANCZOS
