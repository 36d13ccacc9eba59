"""Small mistakes in the core, each with the tests that must notice it: `make mutants`.

A mutant is an edit of one line. The tests named with it are run against a copy of the sources that
has the edit; a mutant that they let pass lives, and means that a test is missing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Attributes:
        file: File in `src/torchcram`.
        before: Text that occurs there exactly once.
        after: Text that takes its place.
        tests: Test files, or tests by their node ids, at least one of which must fail.
    """

    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Returns the text of the file with the edit."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.file} has {self.before!r} {count} times, needed is once")
        return text.replace(self.before, self.after)


ORACLE = ("tests/optim/test_oracle.py",)
STEP = ("tests/optim/test_cram.py", "tests/optim/test_compressed.py")
INTERRUPTS = ("tests/optim/test_interrupts.py",)
STATE = ("tests/optim/test_state.py",)
REFUSED = ("tests/optim/test_bad_input.py",)
HELD = ("tests/test_finetune.py",)
NORM = ("tests/test_batchnorm.py",)
FILES = ("tests/artifact/test_round_trip.py",)
BAD_FILES = ("tests/artifact/test_bad_files.py",)
LAYOUTS = ("tests/test_layouts.py",)
SHARDS = ("tests/test_sharding.py",)
COVERAGE = ("tests/test_coverage.py",)
GRAPHED = ("tests/optim/test_graphed_step.py",)
COMBINED = ("tests/optim/test_combined_gradients.py",)
CHAINS = ("tests/operators/test_chain.py",)
PARTS = ("tests/test_split_batch.py",)
TRANSFORMERS = ("tests/integrations/test_transformers.py",)
BATCHES = ("tests/runtime/cpu/test_runtime_batches.py",)
REORDERED = ("tests/runtime/cpu/test_runtime_reordered.py",)
GENERATION = ("tests/runtime/cpu/test_runtime_generation.py",)
WITHOUT_DATA = (
    "tests/runtime/cpu/test_runtime_modules.py::test_outputs_without_data_have_the_same_shape_and_strides",
)
OUTPUTS = ("tests/runtime/test_outputs.py",)
AS_EXACT = (
    "tests/runtime/cpu/test_runtime_prepare.py::test_sums_that_cancel_may_differ_as_much_as_they_do_from_float64",
)
LIGHTNING = ("tests/integrations/test_lightning.py",)
PACKED = ("tests/integrations/test_compressed_tensors.py",)
GGUF = ("tests/integrations/test_gguf.py",)
EQUATIONS = ("tests/baselines/test_equations.py",)
HELD_MASK = ("tests/baselines/test_held_mask.py",)
PROTOCOL = ("tests/baselines/test_protocol.py",)
INTERRUPTED_METHOD = (f"{PROTOCOL[0]}::test_a_training_interrupted_in_a_pass_resumes_bit_for_bit",)
WITHOUT_ASCENT = ("tests/optim/test_without_ascent.py",)
SCHEDULES = ("tests/baselines/test_schedule_properties.py",)
RECIPE_METHODS = ("tests/experiments/recipe/test_methods.py",)

MUTANTS = [
    Mutant("optim/cram.py", "rho * unit", "-rho * unit", ORACLE),
    Mutant("optim/cram.py", "rule.rho if rho is None else rho", "rho or 0.0", WITHOUT_ASCENT),
    Mutant("optim/cram.py", "masks = self._compress_()", "self._compress_()", ORACLE),
    Mutant("optim/cram.py", "if pass_.plus:", "if not pass_.plus:", ORACLE),
    Mutant("optim/cram.py", "pass_.mask and self.sparse_gradients", "pass_.mask", ORACLE),
    Mutant("optim/cram.py", "self._undo.push(self._backup.restore)", "pass", STEP),
    Mutant("optim/cram.py", "statistics.freeze()", "pass", STEP),
    Mutant("optim/cram.py", "self._abandon(g)", "pass", INTERRUPTS),
    Mutant(
        "optim/cram.py",
        "            self.restore()\n            raise",
        "            raise",
        INTERRUPTS,
    ),
    Mutant(
        "optim/cram.py",
        "if self._step_state.ready or self.allow_plain_steps:",
        "if True:",
        INTERRUPTS,
    ),
    Mutant(
        "optim/cram.py",
        "        self._step_state.ready = False\n        super()",
        "        super()",
        INTERRUPTS,
    ),
    Mutant(
        "optim/cram.py",
        "elif not self._guard.check(hidden + combined, bad):",
        "elif False:",
        REFUSED,
    ),
    Mutant("optim/cram.py", "rng_state.restore()", "pass", STEP),
    Mutant(
        "optim/step_state.py",
        "            self._calls[-1]()\n            self._calls.pop()",
        "            self._calls.pop()()",
        INTERRUPTS,
    ),
    Mutant("optim/sampler.py", "% self.mask_interval == 0", "% self.mask_interval == 1", STEP),
    Mutant("optim/sampler.py", "self._uses[operator] += 1", "pass", STEP),
    Mutant("optim/sampler.py", "self._generator.set_state(generator)", "pass", STATE),
    Mutant("optim/sampler.py", "packed.dtype != torch.uint8", "False", REFUSED),
    Mutant(
        "optim/gradients.py",
        "g.clone() if g._is_view() else g",
        "g",
        ("tests/distributed/test_ddp.py",),
    ),
    Mutant(
        "optim/gradients.py",
        "torch.where(length == 0, 0, 1 / length)",
        "1 / length",
        STEP + REFUSED,
    ),
    Mutant("optim/gradients.py", "kept.get(number)", "None", COMBINED),
    Mutant("optim/gradients.py", "not bool(bad)", "True", COMBINED),
    Mutant("optim/graphed_step.py", "torch.clear_autocast_cache()", "pass", GRAPHED),
    Mutant("optim/graphed_step.py", "self._loss.clone()", "self._loss", GRAPHED),
    Mutant("optim/graphed_step.py", "            step._graphs = None", "            pass", GRAPHED),
    Mutant("optim/graphs.py", "rate.fill_(group", "(group", GRAPHED),
    Mutant("optim/wrapper.py", "        load_extra_state()\n", "", STATE),
    Mutant("optim/checks.py", "id(parameter) not in known", "False", REFUSED),
    Mutant(
        "finetune.py",
        "self._handles.append(optimizer.register_step_post_hook(self._after_step))",
        "pass",
        HELD,
    ),
    Mutant("finetune.py", "zero_unmasked_([local(gradient)], [mask])", "pass", HELD),
    Mutant("finetune.py", "zero_unmasked_(moments, [mask] * len(moments))", "pass", HELD),
    Mutant("batchnorm.py", "layer.track_running_stats = False", "pass", NORM),
    Mutant("batchnorm.py", "layer._buffers.update(dict.fromkeys(buffers))", "pass", NORM),
    Mutant("batchnorm.py", "layer.reset_running_stats()", "pass", NORM),
    Mutant("batchnorm.py", "layer.momentum = old", "pass", NORM),
    Mutant("batchnorm.py", "            buffer.copy_(value)", "            pass", NORM),
    Mutant("layers.py", "1 if layout.transposed else 2, -1", "2, -1", LAYOUTS),
    Mutant(
        "layers.py",
        "layout.transposed and not layout.stacked else",
        "layout.transposed else",
        SHARDS,
    ),
    Mutant("layers.py", "max(rows * layer, here.start)", "rows * layer", SHARDS),
    Mutant("weights.py", "Layout(layers=3)", "PLAIN", LAYOUTS),
    Mutant("weights.py", "up.shape[1] == down.shape[2]", "up.shape[2] == down.shape[1]", LAYOUTS),
    Mutant("weights.py", "key not in embeddings", "True", ("tests/test_weights.py",)),
    Mutant("weights.py", "share > MOST_UNCOVERED", "share > 0", COVERAGE),
    Mutant("weights.py", "        _warned.add(model)\n", "", COVERAGE),
    Mutant("operators/topk.py", "numel() // len(layers)", "numel()", LAYOUTS),
    Mutant("operators/topk.py", "+ 0.0  #", "#", ("tests/operators/test_parse.py",)),
    Mutant(
        "operators/nm.py",
        "index > rival, other >= key",
        "index > rival, other > key",
        ("tests/operators/test_nm.py",),
    ),
    Mutant(
        "operators/quantize.py",
        "torch.where(scale == 0, 1, scale)",
        "scale",
        ("tests/operators/test_quantize.py",),
    ),
    Mutant("operators/quantize.py", "rows.dim() > 2", "False", SHARDS),
    Mutant("operators/chain.py", "kept[name] & masks[name]", "masks[name]", CHAINS),
    Mutant("operators/chain.py", "reversed(parts)", "parts", CHAINS),
    Mutant("artifact/reader.py", "crc32(parts) != entry.crc32", "False", BAD_FILES),
    Mutant("artifact/reader.py", "thorough and sha256(parts) != entry.sha256", "False", BAD_FILES),
    Mutant(
        "artifact/reader.py",
        "require_decodable(parts, self.manifest.tensors[name])",
        "pass",
        BAD_FILES,
    ),
    Mutant("artifact/reader.py", "            require_parts(parts, spec)\n", "", BAD_FILES),
    Mutant("artifact/codec.py", "as_integers(flat) != 0", "flat != 0", FILES),
    Mutant("artifact/codec.py", "codes = spec.from_rows(codes).view(-1)", "pass", FILES),
    Mutant("artifact/integers.py", "[*range(sign), -0.0,", "[*range(sign), 0.0,", FILES),
    Mutant("artifact/format.py", "if len(shape) > MOST_DIMENSIONS:", "if False:", BAD_FILES),
    Mutant("artifact/codec.py", "_has_other_bytes(values):", "False:", BAD_FILES),
    Mutant("batches.py", "begin = count - _nearest(compressed, count)", "begin = end", PARTS),
    Mutant("batches.py", "        first = second = slice(0, count)", "        raise", PARTS),
    Mutant("batches.py", "return batch[rows]  # an entry", "return batch  # an entry", PARTS),
    Mutant(
        "integrations/transformers.py",
        "compressed_items = self._compressed_items",
        "compressed_items = num_items_in_batch",
        TRANSFORMERS,
    ),
    Mutant(
        "integrations/lightning/compressed_pass.py",
        "return training_step(dense, *args)",
        "return training_step(batch, *args)",
        LIGHTNING,
    ),
    Mutant(
        "integrations/lightning/compressed_pass.py",
        "vars(owner).pop(name, None)",
        "pass",
        LIGHTNING,
    ),
    Mutant(
        "integrations/compressed_tensors.py",
        "torch.where(codes == lowest, 0, codes)",
        "codes",
        PACKED,
    ),
    Mutant(
        "integrations/compressed_tensors.py",
        "key=lambda size: size is not None",
        "key=lambda size: size is None",
        PACKED,
    ),
    Mutant(
        "integrations/compressed_tensors.py",
        "missing = -columns % (32 // bits)",
        "missing = 0",
        PACKED,
    ),
    Mutant("integrations/compressed_tensors.py", "if len(shared) > 1:", "if False:", PACKED),
    Mutant("integrations/gguf.py", "halves.transpose(1, 2)", "halves", GGUF),
    Mutant("integrations/gguf.py", "BLOCK // 2 :] << 4", "BLOCK // 2 :] << 3", GGUF),
    Mutant("integrations/gguf.py", "torch.where(codes == minus_zero, 0, codes)", "codes", GGUF),
    Mutant("baselines/base.py", "self._undo.push(self._backup.restore)", "pass", PROTOCOL),
    Mutant("baselines/base.py", "            self.steps += 1\n", "            pass\n", EQUATIONS),
    Mutant(
        "baselines/base.py",
        "self._begun = bool(extra.get",
        "_ = bool(extra.get",
        INTERRUPTED_METHOD,
    ),
    Mutant(
        "baselines/base.py",
        "elif self.moves and not self._ready:",
        "elif False:",
        (f"{PROTOCOL[0]}::test_a_step_with_a_gradient_at_w_is_refused",),
    ),
    Mutant(
        "baselines/base.py",
        "            zero_unmasked_(moments, [mask] * len(moments))\n",
        "            pass\n",
        HELD_MASK,
    ),
    Mutant(
        "baselines/held_mask.py", "mask_gradients_(self.weights, self.masks)", "pass", HELD_MASK
    ),
    Mutant(
        "baselines/held_mask.py",
        "        apply_masks_(self.weights, self.masks)\n",
        "        pass\n",
        HELD_MASK,
    ),
    Mutant("baselines/schedule.py", "* left**3", "* left**2", EQUATIONS),
    Mutant(
        "baselines/schedule.py",
        "if step >= self.end:\n            return final",
        "if step > self.end:\n            return final",
        SCHEDULES,
    ),
    Mutant("baselines/schedule.py", "// self.interval + 1 if", "// self.interval if", SCHEDULES),
    Mutant(
        "baselines/scheduled.py",
        "if schedule.initial > self.final_sparsity:",
        "if False:",
        (f"{PROTOCOL[0]}::test_a_schedule_that_begins_above_the_target_is_refused",),
    ),
    Mutant("baselines/dpf.py", "after_end=True", "after_end=False", EQUATIONS),
    Mutant("baselines/acdc.py", "            self.reset_base_()\n", "", EQUATIONS),
    Mutant("baselines/acdc.py", "// self.period % 2 == 0", "// self.period % 2 == 1", EQUATIONS),
    Mutant(
        "experiments/recipe/methods.py", "epochs * number / 100", "number / 100", RECIPE_METHODS
    ),
    Mutant(
        "experiments/recipe/methods.py",
        "optimizer.check_length(epochs * steps_per_epoch)",
        "pass",
        (
            f"{RECIPE_METHODS[0]}::test_a_schedule_that_ends_after_the_training_is_refused_before_it",
        ),
    ),
    Mutant("runtime/cpu/batches.py", "(1,))", "(2,))", BATCHES),
    Mutant("runtime/cpu/batches.py", "x[beside:].split", "x.split", BATCHES),
    Mutant(
        "runtime/cpu/batches.py", "torch.is_grad_enabled() and x.requires_grad", "False", BATCHES
    ),
    Mutant("runtime/cpu/ops/linear.py", "features = rest[6]", "features = rest[-2]", WITHOUT_DATA),
    Mutant("runtime/cpu/tensor_cache.py", "entry.state == state and ", "", REORDERED),
    Mutant(
        "runtime/cpu/tensor_cache.py", ", lambda _: self._entries.pop(key, None))", ")", REORDERED
    ),
    Mutant(
        "runtime/cpu/prepare.py",
        "<= _AS_EXACT * output_error(exact(), expected) < _ROUGH",
        "< _ROUGH",
        ("tests/runtime/cpu/test_runtime_prepare.py",),
    ),
    Mutant(
        "runtime/cpu/prepare.py",
        "_AS_EXACT, _ROUGH = 4, 0.01",
        "_AS_EXACT, _ROUGH = 0.5, 0.01",
        AS_EXACT,
    ),
    Mutant("runtime/outputs.py", "if children.keys() != others.keys():", "if False:", OUTPUTS),
    Mutant("runtime/cpu/decoder.py", "cache.length = past + 1", "cache.length = past", GENERATION),
    Mutant(
        "runtime/cpu/row_matrix.py",
        "scales = weight.abs().amax(1) / 127",
        "scales = weight.abs().amax(1) / 128",
        GENERATION,
    ),
]


def lives(mutant: Mutant, sources: Path) -> bool:
    """Returns whether all tests pass in spite of the edit."""
    file = sources / "torchcram" / mutant.file
    text = file.read_text()
    file.write_text(mutant.apply(text))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    environment = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{ROOT / 'tests'}"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:  # the edit made a loop endless, which nobody can overlook
        return False
    finally:
        file.write_text(text)
    if done.returncode not in (0, 1):  # neither passed nor failed
        raise RuntimeError(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 0


def main() -> int:
    """Tries all mutants; returns how many live."""
    living = []
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "src"
        shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in MUTANTS:
            start = time.monotonic()
            alive = lives(mutant, sources)
            if alive:
                living.append(mutant)
            verdict = "LIVES" if alive else "dies"
            seconds = time.monotonic() - start
            print(
                f"{verdict:5} {seconds:5.1f} s  {mutant.file}: {mutant.before.strip()}", flush=True
            )
    print(f"{len(MUTANTS) - len(living)} of {len(MUTANTS)} mutants die")
    return len(living)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
