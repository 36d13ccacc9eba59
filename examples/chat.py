"""Chats in the terminal with a compressed language model, on the CPU and in 8 bits.

torchcram train wiki-paragraphs/smollm2-135m/cram-plus-multi --data DATA --out run
torchcram export run --to uniform:0.5 --format transformers --data DATA --out files
python examples/chat.py files/uniform-0.5      # or a compact file; then a message a line
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from torchcram import artifact, runtime
from torchcram.experiments.models.causal import build_causal_model
from torchcram.experiments.models.text import load_tokenizer

LONGEST = 256  # tokens of an answer

path = Path(sys.argv[1])
dtype = sys.argv[2] if len(sys.argv) > 2 else "int8"  # or float32, bfloat16, int4
if path.is_dir():  # --format transformers
    model, tokenizer = (
        kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
else:  # a compact file, which says what model it has the weights of
    name = artifact.read_manifest(path).metadata["recipe"]["model"]["name"]
    model = artifact.load(path, build_causal_model(name, pretrained=False)).model
    tokenizer = load_tokenizer(name)
if tokenizer.chat_template is None:
    sys.exit(f"{path}: the tokenizer has no chat template, so the model was not made for chats")
fast = runtime.prepare_generation(model, getattr(torch, dtype))
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
end, messages = tokenizer.eos_token_id, []
print("say something:", flush=True)
for message in filter(None, map(str.strip, sys.stdin)):
    messages.append({"role": "user", "content": message})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    count = inputs["input_ids"].shape[1]
    room = model.config.max_position_embeddings - count
    if room < 1:
        print(f"(the chat has {count} tokens, the model takes {count + room}: it begins anew)")
        messages = []
        continue
    limits = {"max_new_tokens": min(LONGEST, room), "eos_token_id": end, "pad_token_id": end}
    begin = time.perf_counter()
    answer = fast.generate(**inputs, **limits, do_sample=False, streamer=streamer)[0, count:]
    speed = len(answer) / (time.perf_counter() - begin)
    print(f"({len(answer)} tokens, {speed:.1f} per second)", flush=True)
    text = tokenizer.decode(answer, skip_special_tokens=True)
    messages.append({"role": "assistant", "content": text})
