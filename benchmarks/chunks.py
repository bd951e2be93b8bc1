"""Memory of pruning a video, whole or in chunks of frames: `python benchmarks/chunks.py`.

A LLaVA-OneVision of the real classes with small random weights reads one video of 64 tokens a frame. Counted is the
most memory in use during the call beyond what was in use before it, weights and pixels, as the kernel (Linux) counts
it; a call with fewer frames than a chunk is the same as without chunks.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from clustrs import ClustRS

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds only its own folder
from benchmarks.scaling import cost

SIDE, PATCH, VIDEO = 224, 14, 5
TOKENS = (SIDE // PATCH // 2) ** 2
"""Of a frame: pooled by two along each side."""


def build(width: int = 192, words: int = 448) -> Any:
    """Return the model: tower and language model have 4 layers each."""
    vision = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"hidden_size": words, "intermediate_size": 2 * words, "num_hidden_layers": 4, "num_attention_heads": 7}
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(image_size=SIDE, patch_size=PATCH, vision_use_head=False, **vision),
        text_config=tf.Qwen2Config(vocab_size=100, num_key_value_heads=7, **text),
        image_token_index=4,
        video_token_index=VIDEO,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_grid_pinpoints=[[SIDE, SIDE]],
    )
    torch.manual_seed(0)
    return tf.LlavaOnevisionForConditionalGeneration(config).eval()


def video(frames: int) -> dict[str, Any]:
    """Return a prompt with one video."""
    ids = torch.tensor([[1, *[VIDEO] * (TOKENS * frames + 1), 50, 51]])
    pixels = torch.randn(1, frames, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "pixel_values_videos": pixels}


def measure(frames: list[int], chunks: list[int | None], keep: int) -> list[dict[str, Any]]:
    """Return the megabytes and seconds of each number of frames and chunk."""
    torch.set_num_threads(1)
    model, rows = build(), []
    with torch.inference_mode():
        with ClustRS(keep=1)(model, chunk=1):
            model(**video(2))  # what is set up once
        for count in frames:
            inputs = video(count)
            for chunk in chunks:
                with ClustRS(keep=keep)(model, chunk=chunk) as handle:
                    seconds, used = cost(lambda given: model(**given), inputs)
                    assert handle.last[0].kept == keep
                rows.append({"frames": count, "chunk": chunk, "mb": used / 1e6, "seconds": seconds})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each chunk, a column for each number of frames."""
    frames = list(dict.fromkeys(row["frames"] for row in rows))
    lines = ["| `chunk` |" + "".join(f" {n} frames |" for n in frames), "|:--|" + "--:|" * len(frames)]
    for chunk in dict.fromkeys(row["chunk"] for row in rows):
        cells = [f"{row['mb']:,.0f} MB, {row['seconds']:.1f} s" for row in rows if row["chunk"] == chunk]
        lines.append(f"| {chunk} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 16], help="besides the whole video")
    parser.add_argument("--keep", type=int, default=64)
    options = parser.parse_args()
    print(table(measure(options.frames, [None, *options.chunks], options.keep)))


if __name__ == "__main__":
    main()
