"""Answers from a compact file: compresses a model trained on SQuAD, and asks the small one.

torchcram train squad/minilm-l6/cram-plus-multi-long --out run
python examples/serve_answers.py run paragraph.txt    # then a question a line, or < questions.txt
"""

import sys
import time
from pathlib import Path

import torch

from torchcram import artifact, compress, runtime
from torchcram.experiments.data.text.datasets import CONTEXT
from torchcram.experiments.models.text import load_tokenizer
from torchcram.experiments.recipe.build import target_weights
from torchcram.experiments.tasks.question_answering import best_spans
from torchcram.experiments.training.trainer import load_trained

TARGETS = ("uniform:0.8+int8", "uniform:0.8", "uniform:0.9")
SERVED = "uniform:0.8"

run, paragraph = Path(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8")
trained = load_trained(run, torch.device("cpu"))
recipe, text, model = trained.recipe, trained.recipe.text, trained.model
tokenizer = load_tokenizer(recipe.model.name)
dense_size = (run / "model.safetensors").stat().st_size
files = {target: run / f"{target.replace(':', '-')}.torchcram.safetensors" for target in TARGETS}
for target, path in files.items():
    small = compress(model, target, weights=target_weights(recipe, model))
    artifact.save(small, path, operator=target, embeddings="int8", metadata=recipe.to_dict())
    size = path.stat().st_size
    print(f"{target}: {size / 1e6:.2f} MB, {dense_size / size:.1f} times smaller")

artifact.load(files[SERVED], model)  # into a model of the same layers, every checksum compared


def windows(question):
    """Returns the model's inputs, which tokens are the paragraph's, and their characters."""
    cut = {"truncation": "only_second", "max_length": text.length, "stride": text.stride}
    also = ("padding", "return_overflowing_tokens", "return_offsets_mapping")
    also = dict.fromkeys((*also, "return_token_type_ids"), True)
    code = tokenizer(question, paragraph, return_tensors="pt", **cut, **also)
    rows = [code.sequence_ids(row) for row in range(len(code["input_ids"]))]
    inside = torch.tensor([[whose == 1 for whose in row] for row in rows])
    kinds = (1 + code["token_type_ids"] + CONTEXT * inside) * code["attention_mask"]
    return torch.stack((code["input_ids"], kinds), 1), inside, code["offset_mapping"]


fast = runtime.prepare(model, windows("What is this about?")[0])  # layers change where that pays
print(f"{sum(one.sparse for one in runtime.report(fast))} layers run sparse; ask:", flush=True)
for question in map(str.strip, sys.stdin):
    begin = time.perf_counter()
    inputs, inside, places = windows(question)
    with torch.inference_mode():
        scores, spans = best_spans(fast(inputs), inside)
    row = int(scores.argmax())  # the window with the best answer
    first, last = places[row, spans[row, 0], 0], places[row, spans[row, 1], 1]
    print(f"{paragraph[first:last]!r} in {1000 * (time.perf_counter() - begin):.0f} ms", flush=True)
