"""Causal language models with a few weights, and a few lines of running text."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LENGTH = 16  # tokens of a block
RECIPE = "wiki-paragraphs/smollm2-135m/{}"
SETTINGS = [
    f"task.args.length={LENGTH}",
    "task.args.stride=4",
    "task.args.also_test=[]",
    "train.batch_size=4",
    "train.epochs=2",
    "optimizer.lr=0.01",
    "compress.to=[uniform:0.5, int8]",
    "compress.calibration_samples=4",
]
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def byte_tokenizer(folder):
    """A tokenizer whose tokens are bytes, and an end of text."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<end>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return len(vocabulary)


def causal_folder(folder, kind="Llama", **changes):
    """A small model of an architecture, its weights random, with its tokenizer."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    settings = {"vocab_size": byte_tokenizer(folder), **SHAPE, **changes}
    if kind == "GPT2":
        settings |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        settings = {key: value for key, value in settings.items() if key not in SHAPE}
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    name = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


def text_folder(folder, name="wiki-paragraphs"):
    """A dataset of a few paragraphs, most of them alike."""
    (folder / name).mkdir(parents=True)
    for split, count in (("train", 12), ("valid", 2), ("test", 3)):
        paragraphs = [f"The castle of king {n} was built in {1800 + n}." for n in range(count)]
        (folder / name / f"{split}.txt").write_text("\n\n".join(paragraphs) + "\n")
    return folder
