"""The command line of torchcram; rank 1 waits once after the second epoch, until a signal comes.

Started by torchrun in place of `-m torchcram`, so that a test can kill or interrupt a rank in the
middle of a training, however fast or slow the machine is.
"""

import os
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from torchcram.cli import app

HELD = Path("held")  # exists from the moment that rank 1 waits


def hold(*_):
    """Waits for a signal; called after every step of an optimizer."""
    second = Path("run", "checkpoints", "epoch-0002.pt")
    if os.environ["RANK"] == "1" and second.exists() and not HELD.exists():
        HELD.touch()
        while True:
            time.sleep(0.05)


if __name__ == "__main__":
    register_optimizer_step_post_hook(hold)
    app(prog_name="torchcram")
