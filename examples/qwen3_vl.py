import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from clustrs import ClustRS

name = "Qwen/Qwen3-VL-2B-Instruct"
model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
processor = AutoProcessor.from_pretrained(name)
content = [{"type": "image", "image": Image.open("photo.jpg")}, {"type": "text", "text": "What is in this picture?"}]
messages = [{"role": "user", "content": content}]
options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
inputs = processor.apply_chat_template(messages, **options).to(model.device, model.dtype)
with ClustRS(keep=0.25)(model), torch.inference_mode():  # a quarter of the visual tokens
    output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
