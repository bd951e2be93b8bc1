"""Choose the photographs that come with the package: of each kind, the first three of those kept for testing.

python -m recipes.photo.ship        copies them to src/clustrs/embedded/photos
"""

import argparse
import shutil
from collections import Counter
from pathlib import Path

from clustrs_models.photographs import KINDS, PHOTOS, list_photos
from recipes.photo.settings import DATA

EACH = 3
NOTICE = """The photographs in this folder are from Caltech 101 (version 1.0) by Fei-Fei Li, Marco Andreetto,
Marc'Aurelio Ranzato and Pietro Perona, California Institute of Technology, 2004
(https://data.caltech.edu/records/mzrjq-6wc02), licensed under CC BY 4.0, https://creativecommons.org/licenses/by/4.0/.

Changes: {count} of about 9,000 photographs were chosen, {each} of each of {kinds} kinds, and made smaller (the
shorter side has at most 200 pixels). Folders have the names of the dataset.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    taken: Counter[str] = Counter()
    for photo in list_photos(options.data, test=True):
        taken[photo.kind.folder] += 1
        if taken[photo.kind.folder] <= EACH:
            target = PHOTOS / photo.kind.folder / photo.path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(photo.path, target)
    count = EACH * len(KINDS)
    (PHOTOS / "NOTICE").write_text(NOTICE.format(count=count, each=EACH, kinds=len(KINDS)))


if __name__ == "__main__":
    main()
