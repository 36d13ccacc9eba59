"""Runs `model.onnx` of a folder in DeepSparse, once for every line of the input.

`benchmarks/runtime.py --deepsparse PYTHON` starts it, in an environment with `deepsparse` alone.
The first outputs are written to `y.npy`.
"""

import sys
from pathlib import Path

import numpy
from deepsparse import compile_model

folder, threads = Path(sys.argv[1]), int(sys.argv[2])
x = numpy.load(folder / "x.npy")
engine = compile_model(str(folder / "model.onnx"), batch_size=len(x), num_cores=threads)
numpy.save(folder / "y.npy", engine.run([x])[0])
for _ in sys.stdin:
    engine.run([x])
    print("done", flush=True)
