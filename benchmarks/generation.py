"""Tokens per second while a language model generates on the CPU.

    python benchmarks/generation.py MODEL [--targets dense uniform:0.7 uniform:0.7+int8 ...]
                                          [--types float32 bfloat16 int8] [--threads 1 2]
                                          [--tokens N] [--rounds N]
    python benchmarks/generation.py MODEL.gguf [--threads 1 2] [--tokens N] [--rounds N]

MODEL is a folder of Transformers with a Llama-like model. Every target is generated with by torch
(eager, the type of the model) and by `torchcram.runtime.prepare_generation` in every type; the
prompt has 32 tokens, and only the tokens after the first are timed. With a GGUF file, llama.cpp
generates (`pip install llama-cpp-python`, an environment of its own without torch will do).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

PROMPT = 32  # tokens
TYPES = ("float32", "bfloat16", "int8")


def milliseconds(generate: Callable[[int], object], tokens: int, rounds: int) -> list[float]:
    """The time of a token, once per round: that of more tokens less that of one."""
    generate(1)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        generate(1)
        middle = time.perf_counter()
        generate(tokens + 1)
        end = time.perf_counter()
        times.append(1000 * ((end - middle) - (middle - start)) / tokens)
    return times


def show(name: str, times: list[float], megabytes: float | None = None) -> None:
    """Prints a row."""
    middle = statistics.median(times)
    spread = (max(times) - min(times)) / 2
    size = "" if megabytes is None else f"{megabytes:>9.0f} MB per token"
    print(
        f"  {name:<40}{middle:>8.2f} ms +-{spread:>6.2f}{1000 / middle:>8.1f} tokens/s{size}",
        flush=True,
    )


def measure(
    folder: str, targets: list[str], types: list[str], threads: list[int], tokens: int, rounds: int
) -> None:
    """Prints the rows of a model of Transformers."""
    import torch
    from timing import machine
    from transformers import AutoModelForCausalLM

    from torchcram import compress
    from torchcram.runtime import prepare_generation
    from torchcram.runtime.cpu.row_matrix import RowLinear

    print(machine(torch.device("cpu")), flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT))

    def generator(model: torch.nn.Module) -> Callable[[int], object]:
        def generate(count: int) -> object:
            with torch.inference_mode():
                return model.generate(  # type: ignore[operator]
                    prompt,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )

        return generate

    for count in threads:
        torch.set_num_threads(count)
        print(f"\n{count} thread(s)", flush=True)
        show("torch, eager", milliseconds(generator(model), tokens, rounds))
        for target in targets:
            small = model if target == "dense" else compress(model, target)
            for kind in types:
                fast = prepare_generation(small, getattr(torch, kind))
                packed = [m for m in fast.modules() if isinstance(m, RowLinear)]
                megabytes = sum(matrix.nbytes for matrix in packed) / 1e6
                show(f"{target}, {kind}", milliseconds(generator(fast), tokens, rounds), megabytes)


def measure_gguf(file: str, threads: list[int], tokens: int, rounds: int) -> None:
    """Prints the rows of llama.cpp."""
    from llama_cpp import Llama

    for count in threads:
        model = Llama(file, n_threads=count, n_threads_batch=count, n_ctx=512, verbose=False)

        def generate(number: int, model: Llama = model) -> None:
            model.reset()
            for done, _ in enumerate(model.generate(list(range(100, 100 + PROMPT)), temp=0.0), 1):
                if done == number:
                    return

        show(f"llama.cpp, {count} thread(s)", milliseconds(generate, tokens, rounds))


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description="Times the generation of text on the CPU.")
    parser.add_argument("model", help="folder of Transformers, or a GGUF file for llama.cpp")
    parser.add_argument(
        "--targets", nargs="+", default=["dense", "uniform:0.5", "uniform:0.7", "uniform:0.8"]
    )
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.model.endswith(".gguf"):
        measure_gguf(arguments.model, arguments.threads, arguments.tokens, arguments.rounds)
    else:
        measure(
            arguments.model,
            arguments.targets,
            arguments.types,
            arguments.threads,
            arguments.tokens,
            arguments.rounds,
        )


if __name__ == "__main__":
    main()
