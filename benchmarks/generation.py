"""Tokens per second while a language model generates on the CPU.

    python benchmarks/generation.py MODEL [--targets dense uniform:0.7 ...] [--threads 1 2]
                                          [--types float32 bfloat16 int8 int4] [--compile]
                                          [--llama PYTHON --gguf FILE ...]
                                          [--genai PYTHON --onnx FOLDER ...]
                                          [--tokens N] [--rounds N]

MODEL is a folder of Transformers with a Llama-like model. All engines take turns, round after
round, so that other load on the machine affects all of them: torch, eager in float32 and bfloat16
and with `--compile` also compiled with a static cache; `torchcram.runtime.prepare_generation` for
every target and type, int4 only where the weights have 4 bits; llama.cpp on GGUF files; and ONNX
Runtime on folders that `python -m onnxruntime_genai.models.builder -m MODEL -o FOLDER -p int4 -e
cpu` wrote. The last two run in processes of their own, with the interpreters of environments that
have `llama-cpp-python` and `onnxruntime-genai`. The prompt is timed by itself, and then only the
tokens after it. Times are medians of the rounds, in brackets those of the fastest round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = 128  # tokens
TYPES = ("float32", "bfloat16", "int8", "int4")
Generate = Callable[[int], float]
"""Function of a number of tokens: generates them and returns the seconds it took."""


def seconds(work: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def race(engines: dict[str, Generate], tokens: int, rounds: int) -> dict[str, list[list[float]]]:
    """Returns for every engine the milliseconds of a prompt and of a token, in all rounds."""
    times: dict[str, list[list[float]]] = {name: [[], []] for name in engines}
    for turn in range(rounds + 1):
        for name, generate in engines.items():
            one, more = generate(1), generate(tokens + 1)
            if turn > 0:
                times[name][0].append(1000 * one)
                times[name][1].append(1000 * (more - one) / tokens)
    return times


def transformers_engine(model: object, **options: object) -> Generate:
    """Returns `generate` of a model of Transformers, without an end of the text."""
    import torch

    prompt = torch.arange(100, 100 + PROMPT).view(1, -1)
    model.generation_config.eos_token_id = None  # type: ignore[attr-defined]

    @torch.inference_mode()
    def generate(count: int) -> float:
        arguments = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **options}
        return seconds(lambda: model.generate(prompt, **arguments))  # type: ignore[attr-defined]

    return generate


def torch_engines(folder: str, *, compiled: bool) -> dict[str, Generate]:
    """Returns torch in the types that it generates in."""
    import torch
    from transformers import AutoModelForCausalLM

    engines = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        engines[f"torch, {name}"] = transformers_engine(model)
        if compiled:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            model.forward = torch.compile(model.forward, dynamic=False)
            options = {"cache_implementation": "static", "disable_compile": True}
            engines[f"torch, compiled, {name}"] = transformers_engine(model, **options)
    return engines


def our_engines(
    folder: str, targets: list[str], types: list[str]
) -> tuple[dict[str, Generate], dict[str, float]]:
    """Returns the prepared models, and the megabytes of weights that each reads for a token."""
    import torch
    from transformers import AutoModelForCausalLM

    from torchcram import compress
    from torchcram.experiments.bench.generators import PromptKernels
    from torchcram.runtime.cpu.row_matrix import RowLinear

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.arange(100, 100 + PROMPT).view(1, -1)
    engines, sizes = {}, {}
    for target in targets:
        small = model if target == "dense" else compress(model, target)
        prompts = PromptKernels(small, prompt)
        for kind in types:
            name = f"torchcram, {target}, {kind}"
            try:
                fast = prompts.with_single_tokens(getattr(torch, kind))
            except ValueError as error:  # no weights of 4 bits
                print(f"{name}: {error}", file=sys.stderr)
                continue
            packed = [m for m in fast.modules() if isinstance(m, RowLinear)]
            sizes[name] = sum(matrix.nbytes for matrix in packed) / 1e6
            engines[name] = transformers_engine(fast)
    return engines, sizes


def engine_apart(python: str, engine: str, file: str, threads: int) -> Generate:
    """Returns llama.cpp or ONNX Runtime (a key of `SERVERS`) in a process of its own."""
    command = [python, __file__, "--serve", engine, file, "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def generate(count: int) -> float:
        if process.stdin is None or process.stdout is None or process.poll() is not None:
            raise RuntimeError(f"{engine} did not start: {' '.join(command)}")
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{engine} has ended: {' '.join(command)}")
        return float(answer)

    return generate


def llama_cpp(file: str, threads: int) -> Callable[[int], None]:
    """Returns a function that generates as many tokens as it is told, with llama.cpp."""
    from llama_cpp import Llama

    model = Llama(file, n_threads=threads, n_threads_batch=threads, n_ctx=1024, verbose=False)

    def generate(count: int) -> None:
        model.reset()
        for done, _ in enumerate(model.generate(list(range(100, 100 + PROMPT)), temp=0.0), 1):
            if done == count:
                return

    return generate


def onnx_runtime(folder: str, threads: int) -> Callable[[int], None]:
    """Returns a function that generates as many tokens as it is told, with ONNX Runtime."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(folder)
    # its threads would go on spinning while the next engine is timed
    stop = {"session.force_spinning_stop": "1"}
    options = {"session_options": {"intra_op_num_threads": threads, **stop}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = onnxruntime_genai.Model(config)

    def generate(count: int) -> None:
        parameters = onnxruntime_genai.GeneratorParams(model)
        length = PROMPT + count
        parameters.set_search_options(do_sample=False, min_length=length, max_length=length)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(list(range(100, 100 + PROMPT)))
        for _ in range(count):
            generator.generate_next_token()

    return generate


SERVERS = {"llama.cpp": llama_cpp, "ONNX Runtime": onnx_runtime}


def serve(engine: str, file: str, threads: int) -> None:
    """Generates as many tokens as each line of the input says; prints the seconds."""
    generate = SERVERS[engine](file, threads)
    for line in sys.stdin:
        print(seconds(lambda count=int(line): generate(count)), flush=True)  # type: ignore[misc]


def measure(arguments: argparse.Namespace, threads: int) -> None:
    """Prints a line for every engine."""
    import torch

    torch.set_num_threads(threads)
    engines, sizes = our_engines(arguments.model, arguments.targets, arguments.types)
    others = torch_engines(arguments.model, compiled=arguments.compile)
    apart = [(arguments.llama, "llama.cpp", file) for file in arguments.gguf]
    apart += [(arguments.genai, "ONNX Runtime", folder) for folder in arguments.onnx]
    for python, engine, file in apart:
        others[f"{engine}, {Path(file).name}"] = engine_apart(python, engine, file, threads)
    print(f"\n{threads} thread(s), prompt of {PROMPT} tokens", flush=True)
    for name, times in race({**others, **engines}, arguments.tokens, arguments.rounds).items():
        (prompt, token), (fast_prompt, fast) = map(statistics.median, times), map(min, times)
        size = f"{sizes[name]:>7.0f} MB per token" if name in sizes else ""
        print(
            f"  {name:<38} prompt{prompt:>7.0f} ms ({fast_prompt:.0f}), token{token:>7.2f} ms "
            f"({fast:.2f}), {1000 / token:>6.1f} tokens/s ({1000 / fast:.1f}){size}",
            flush=True,
        )


def main() -> None:
    """Prints one table for every number of threads."""
    parser = argparse.ArgumentParser(description="Times the generation of text on the CPU.")
    parser.add_argument("model", nargs="?", help="folder of Transformers")
    parser.add_argument(
        "--targets", nargs="+", default=["dense", "uniform:0.5", "uniform:0.7", "uniform:0.8"]
    )
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--compile", action="store_true", help="also torch.compile")
    parser.add_argument("--llama", default=sys.executable, help="interpreter with llama_cpp")
    parser.add_argument("--gguf", nargs="+", default=[], help="files that llama.cpp generates with")
    parser.add_argument("--genai", default=sys.executable, help="interpreter for ONNX Runtime")
    parser.add_argument("--onnx", nargs="+", default=[], help="folders of its model builder")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        engine, file = arguments.serve
        serve(engine, file, arguments.threads[0])
        return
    if arguments.model is None:
        parser.error("name a folder with a model")
    import torch
    from timing import machine

    print(machine(torch.device("cpu")), flush=True)
    for threads in arguments.threads:
        measure(arguments, threads)


if __name__ == "__main__":
    main()
