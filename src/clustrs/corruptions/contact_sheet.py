"""A contact sheet: one image, clean and with every corruption at every level there is."""

from PIL import Image, ImageDraw, ImageFont

from clustrs.corruptions import Corruption, Group, corruption_rule, list_corruptions, missing_reason

LARGEST = 1024  # an image with a longer side than this is scaled down first: otherwise a photograph would take minutes
CELL, GAP, LINE, NAMES = 208, 12, 24, 168
INK, PALE, PAPER = "#1a1a1a", "#5f5f5f", "#ffffff"
TITLES: dict[Group, str] = {
    "paper": "The paper's corruptions",
    "imagenet_c": "ImageNet-C, severities 1 to 5 (their full names begin with imagenet_c/)",
    "plugin": "Corruptions of other packages",
}


def contact_sheet(image: Image.Image, image_id: str = "", seed: int = 0) -> Image.Image:
    """Draw the clean image, then every corruption that is registered: one row per corruption, one cell per level."""
    notes = [image_id, f"seed {seed}", f"{image.width} x {image.height} pixels"]
    if max(image.size) > LARGEST:
        image = image.resize(fitted(image.size, LARGEST), Image.Resampling.LANCZOS)
        notes.append(f"scaled down to {image.width} x {image.height} for this sheet")
    rules = {name: corruption_rule(name) for name in list_corruptions(usable=False)}
    sections = {group: [name for name, rule in rules.items() if rule.group == group] for group in TITLES}
    sections = {group: names for group, names in sections.items() if names}
    missing = {name: reason for name in rules if (reason := missing_reason(name))}
    row = fitted(image.size, CELL)[1] + LINE + GAP
    top_row = max(row, len(notes) * LINE + GAP)
    height = 2 * GAP + top_row + (len(rules) - len(missing)) * row + 2 * len(sections) * LINE
    columns = max(len(rule.levels) for rule in rules.values())
    size = (GAP + NAMES + columns * (CELL + GAP), height + len(missing) * (LINE + GAP))
    page = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(page)
    large, normal, small = (ImageFont.load_default(size) for size in (20, 17, 15))

    def cell(shown: Image.Image, column: int, caption: str) -> None:
        how = Image.Resampling.NEAREST if max(shown.size) < CELL else Image.Resampling.LANCZOS  # pixels stay visible
        shown = shown.resize(fitted(shown.size, CELL), how)
        left = GAP + NAMES + column * (CELL + GAP)
        page.paste(shown, (left, top))
        draw.text((left, top + shown.height + 3), caption, INK, small)

    top = GAP
    draw.text((GAP, top), "clean", INK, normal)
    cell(image, 0, "")
    draw.text((2 * GAP + NAMES + CELL, top), "\n".join(filter(None, notes)), PALE, small, spacing=8)
    top += top_row
    for group, names in sections.items():
        draw.text((GAP, top + 2), TITLES[group], INK, large)
        draw.line((GAP, top + LINE + 6, page.width - GAP, top + LINE + 6), PALE)
        top += 2 * LINE
        for name in names:
            draw.text((GAP, top), name.removeprefix("imagenet_c/"), INK, normal)
            if name in missing:
                draw.text((GAP + NAMES, top), missing[name], PALE, normal)
                top += LINE + GAP
                continue
            for column, level in enumerate(rules[name].levels):
                corruption = Corruption(name, level)
                cell(corruption.apply(image, image_id, seed), column, corruption.level_text)
            top += row
    return page


def fitted(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return the size of the same shape (nearly, where it is very long) whose longer side is `side`."""
    scale = side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
