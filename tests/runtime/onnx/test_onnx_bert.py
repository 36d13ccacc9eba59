import pytest
import torch

from torchcram import compress, compressible_weights
from torchcram.runtime.onnx import export_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
transformers = pytest.importorskip("transformers")


def test_a_model_that_answers_questions(tmp_path):
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.BertForQuestionAnswering(config).eval()
    model = compress(model, "uniform:0.5+int8")
    tokens, types = torch.randint(100, (2, 12)), torch.randint(2, (2, 12))
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    path = tmp_path / "bert.onnx"
    example = {"token_type_ids": types, "input_ids": tokens, "attention_mask": mask}
    export_onnx(model, path, example)
    graph = onnx.load(path).graph
    used = [name for name in compressible_weights(model) if "pooler" not in name]
    assert [node.op_type for node in graph.node].count("DequantizeLinear") == len(used)
    assert [one.name for one in graph.input] == list(example)
    assert [one.name for one in graph.output] == ["start_logits", "end_logits"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {name: torch.cat([value, value[:1]]) for name, value in example.items()}
    found = session.run(None, {name: value.numpy() for name, value in given.items()})
    expected = model(**given)
    for one, other in zip(found, (expected.start_logits, expected.end_logits), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-4, atol=1e-5)
