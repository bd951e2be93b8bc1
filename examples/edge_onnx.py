"""Ask about an image with the vision part in onnxruntime and the language model in transformers.

Writes the tower, scoring, projector and selection of a model as one ONNX file (unless it is there already), lets
onnxruntime encode the image with it, and feeds the k visual tokens to the language model, whose prompt has k
placeholders instead of one for every token. Everything that an edge device has to do is in `encode` and `answers`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from clustrs import ClustRS, Corruption, chat_prompt, export_onnx, image_path, load_model, quiet_transformers


def open_graph(path: Path, threads: int = 0, spinning: bool = True) -> Any:
    """A session of onnxruntime for a graph; 0 threads means as many as there are cores. Spinning threads wait for the
    next call on their cores, for a while."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def encode(graph: Any, processor: Any, images: list[Image.Image]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Image features [B, k, D] and the indices [B, k] of the tokens that they stand for."""
    pixels = processor.image_processor(images, return_tensors="np")["pixel_values"]
    dtype = np.float16 if graph.get_inputs()[0].type == "tensor(float16)" else np.float32
    features, indices = graph.run(["image_features", "indices"], {"pixel_values": pixels.astype(dtype)})
    return features, indices


def answers(
    model: Any, processor: Any, features: NDArray[np.float32], questions: list[str], max_new_tokens: int = 8
) -> list[str]:
    """Greedy answers to questions, the i-th about the image of features[i]."""
    slots = processor.image_token * features.shape[1]
    texts = [chat_prompt(processor, question).replace(processor.image_token, slots) for question in questions]
    prompt = processor.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    rows: list[Tensor] = list(torch.from_numpy(features).to(model.dtype))
    output = model.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=rows)},
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    texts = processor.batch_decode(output[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default="sample:scene-1", help="a file, or sample:NAME")
    parser.add_argument("question", nargs="?", default="How many objects are there?")
    parser.add_argument("--model", default="mini-llava", help="a LLaVA-1.5 model (default: the embedded mini-llava)")
    parser.add_argument("--keep", type=int, default=16, help="how many visual tokens survive (default: 16)")
    parser.add_argument("--corrupt", type=Corruption.parse, help="for example gaussian:0.5")
    parser.add_argument("--graph", type=Path, default=Path("out/edge/vision.onnx"), help="the ONNX file")
    options = parser.parse_args()

    quiet_transformers()
    model, processor = load_model(options.model)
    if not options.graph.exists():
        info = export_onnx(model, ClustRS(keep=options.keep), options.graph)
        print(f"written: {options.graph} ({info.kept} of {info.tokens} tokens)")
    image = Image.open(image_path(options.image)).convert("RGB")
    if options.corrupt is not None:
        image = options.corrupt.apply(image, options.image)
    features, indices = encode(open_graph(options.graph), processor, [image])
    print(f"kept tokens: {' '.join(map(str, indices[0]))}")
    print(answers(model, processor, features, [options.question])[0])


if __name__ == "__main__":
    main()
