"""Writes a language model and its tokenizer as a folder, to take to a machine without a network.

python examples/model_folder.py minilm-l6 models/minilm-l6            # or .../minilm-l6 float16
TORCHCRAM_MODELS=models torchcram train squad/minilm-l6/adam --data DATA
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModel

from torchcram.experiments.models.causal import build_causal_model
from torchcram.experiments.models.text import find_source, load_tokenizer

name, folder = sys.argv[1], Path(sys.argv[2])
dtype = sys.argv[3] if len(sys.argv) > 3 else "float32"
source, options = find_source(name)  # a folder, also that of an installed package, or a hub name
if options:  # a GGUF file, as smollm2-135m has
    model, info = build_causal_model(name, pretrained=True).model, {"missing_keys": []}
else:
    model, info = AutoModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
if info["missing_keys"]:
    sys.exit(f"{source} has no weights for {', '.join(sorted(info['missing_keys']))}")
model.to(getattr(torch, dtype))  # training computes in float32 all the same
for key, value in model.state_dict().items():
    if not value.isfinite().all():
        sys.exit(f"{key} has values that are not finite in {dtype}")
model.save_pretrained(folder)
load_tokenizer(name, unlimited=False).save_pretrained(folder)
size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
print(f"{folder}: {size:.1f} MB; use it by --set model.name={folder.resolve()}")
