"""Ask a built smol-llava questions about test photographs and scenes, greedily, and count what is right.

    python -m recipes.smol.measure FOLDER NAME [--images 100] [--noise 0.1] [--gray]

An answer is right when it has the expected word. Writes results/NAME.json: right of asked by kind of question, with
every reply, and the share of things named in descriptions.
"""

import argparse
import json
import re
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from recipes.smol.data import choose, generator_for
from recipes.smol.features import DATA
from recipes.smol.images import Images
from recipes.smol.stability import RESULTS, noisy

SEED = 2028
NEW_TOKENS = 48


def has(text: str, word: str) -> bool:
    """Tell whether a reply has a word (or words), whatever the case."""
    return re.search(rf"\b{re.escape(word.lower())}\b", text.lower()) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--questions", type=int, default=4, help="questions per image")
    parser.add_argument("--part", choices=("held", "test"), default="test")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SIGMA")
    parser.add_argument("--gray", action="store_true", help="show a gray image instead")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = LlavaForConditionalGeneration.from_pretrained(options.folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(options.folder)
    processor.tokenizer.padding_side = "left"
    images = Images(options.data / "caltech101", options.data / "pets", options.part, clean=True)
    counts: dict[str, list[float]] = defaultdict(list)
    replies = []
    started = time.monotonic()
    for number in range(options.images):
        shown = images[number]
        generator = generator_for(SEED, number)
        asked = choose(shown.questions, shown.names, generator)
        asked = [asked[i] for i in generator.permutation(len(asked))][: options.questions]
        image = shown.pixels
        if options.noise:
            image = noisy(image, options.noise, np.random.default_rng((SEED, number)))
        if options.gray:
            image = Image.new("RGB", image.size, (128, 128, 128))
        prompts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}],
                add_generation_prompt=True,
            )
            for question in asked
        ]
        inputs = processor(images=[image] * len(asked), text=prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for question, text in zip(asked, texts, strict=True):
            if question.kind == "describe":
                score = sum(has(text, name) for name in shown.names) / len(shown.names)
            else:
                score = float(has(text, question.word))
            counts[question.kind].append(score)
            replies.append([number, question.kind, question.text, question.word, text.strip(), score])
    result = {
        "part": options.part,
        "images": options.images,
        "noise": options.noise,
        "gray": options.gray,
        "seconds_per_image": round((time.monotonic() - started) / options.images, 2),
        "right": {
            kind: {"share": round(sum(scores) / len(scores), 4), "asked": len(scores)}
            for kind, scores in sorted(counts.items())
        },
        "replies": replies,
    }
    RESULTS.mkdir(exist_ok=True)
    lines = json.dumps({**result, "replies": []}, indent=1).replace('"replies": []', '"replies": [\n  %s\n ]')
    (RESULTS / f"{options.name}.json").write_text(lines % ",\n  ".join(map(json.dumps, replies)) + "\n")
    print(json.dumps(result["right"], indent=1))


if __name__ == "__main__":
    main()
