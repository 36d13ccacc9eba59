"""CrAM+ in the Trainer of Transformers: a tiny BERT that reads images of digits as 16 tokens.

python examples/transformers_trainer.py [EPOCHS]    # scikit-learn's digits; no download
"""

import sys

import torch
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments

from torchcram import CrAM, compressible_weights
from torchcram.integrations.transformers import CrAMTrainer

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
TARGETS = ["global:0.5", "uniform:0.7", "nm:2:4"]

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
tokens = pixels.view(-1, 4, 2, 4, 2).mean((2, 4)).round().long().flatten(1)  # grey levels, 0 to 16
data = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
train, test = data[:1440], data[1440:]  # other people wrote the latter

torch.manual_seed(0)
config = AutoConfig.for_model(
    "bert",
    vocab_size=17,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=16,
    num_labels=10,
)
model = AutoModelForSequenceClassification.from_config(config)
arguments = TrainingArguments(
    "runs/transformers-example",
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)


def cram(model, base):
    weights = compressible_weights(model, skip="classifier")
    return CrAM(model, base, TARGETS, rho=0.01, weights=weights)


trainer = CrAMTrainer(model, arguments, train_dataset=train, cram=cram)
trainer.train()
small = {target: trainer.compress(target) for target in TARGETS}
for name, one in {"dense": model, **small}.items():
    scores = Trainer(one, arguments).predict(test).predictions
    print(f"{name}: {(scores.argmax(1) == labels[1440:].numpy()).mean():.1%}")
