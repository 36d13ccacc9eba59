"""A language model with a few weights, and datasets with a few lines, that the tests share."""

import json
import string

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = "the a river runs north of city castle was built in 1850 by king who where when what is old"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(folder):
    """A WordPiece tokenizer that knows a few words and otherwise letters; saved and loaded."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    letters = string.ascii_lowercase + string.digits + string.punctuation + "éßü中"
    pieces = [*SPECIAL, *WORDS.split(), *letters, *(f"##{one}" for one in letters)]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def model_folder(folder, **changes):
    """A BERT of two layers, its weights random, with its tokenizer."""
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    size = len(tokenizer(folder))
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **changes}
    config = BertConfig(
        vocab_size=size, intermediate_size=32, max_position_embeddings=128, **settings
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def question(text, answer, start):
    return {"question": text, "id": text, "answers": [{"text": answer, "answer_start": start}]}


def squad(paragraphs):
    """The JSON of SQuAD; `paragraphs` are contexts with their questions."""
    found = [{"context": context, "qas": questions} for context, questions in paragraphs]
    return {"version": "1.1", "data": [{"title": "a", "paragraphs": found}]}


def squad_folder(folder, train=20, test=6):
    """A dataset of so many questions about as many paragraphs."""
    place = folder / "squad"
    place.mkdir(parents=True)
    for name, count in (("train-v1.1.json", train), ("dev-v1.1.json", test)):
        paragraphs = []
        for number in range(count):
            context = f"The castle of king {number} was built in {1800 + number} by the old river."
            answer = str(1800 + number)
            asked = question(f"When was castle {number} built?", answer, context.index(answer))
            paragraphs.append((context, [asked]))
        (place / name).write_text(json.dumps(squad(paragraphs)))
    return folder


def glue_folder(folder, name, train, test):
    """A folder with two tsv files."""
    place = folder / name
    place.mkdir(parents=True)
    (place / "train.tsv").write_text(train, encoding="utf-8")
    (place / "dev.tsv").write_text(test, encoding="utf-8")
    return folder
