"""Causal language models with a few weights, and a few lines of running text."""

import json

import torch
from safetensors.torch import load_file
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

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


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


def write_gguf(path, decoder, architecture="llama"):
    """Writes the small Llama of a folder as GGUF; returns its weights."""
    import gguf
    from transformers import AutoTokenizer

    writer = gguf.GGUFWriter(path, architecture)
    shape = json.loads((decoder / "config.json").read_text())
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    size = byte_tokenizer(path.parent / "tokens")
    vocabulary = AutoTokenizer.from_pretrained(decoder).get_vocab() | {"ab": size}  # for a merge
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3] + [1] * size)
    writer.add_token_merges(["a b"])
    writer.add_chat_template(TEMPLATE)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(0)
    stored = load_file(decoder / "model.safetensors")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer.add_tensor("token_embd.weight", stored["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", stored["model.norm.weight"].numpy())
    for layer in range(shape["num_hidden_layers"]):
        for ours, theirs in names.items():
            value = stored[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # GGUF has the halves of rotations interleaved
                count = heads if theirs == "attn_q" else shape["num_key_value_heads"]
                halves = value.view(count, 2, len(value) // count // 2, -1)
                value = halves.transpose(1, 2).reshape(value.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
