"""Methods that CrAM is compared with, one small file each, by the same protocol as `CrAM`."""

from torchcram.baselines.acdc import ACDC
from torchcram.baselines.base import Baseline
from torchcram.baselines.dpf import DPF
from torchcram.baselines.frank_wolfe import SFW, CompressionAwareSFW
from torchcram.baselines.gradual_magnitude import GradualMagnitude
from torchcram.baselines.gradual_obs import GradualObs
from torchcram.baselines.held_mask import HeldMask
from torchcram.baselines.l0 import L0
from torchcram.baselines.lottery import LotteryTickets
from torchcram.baselines.movement import Movement, SoftMovement
from torchcram.baselines.platon import PLATON
from torchcram.baselines.registry import register_method
from torchcram.baselines.schedule import SparsitySchedule, Steps
from torchcram.baselines.scheduled import Scheduled
from torchcram.baselines.soft_threshold import STR
from torchcram.baselines.sr_ste import SRSTE

__all__ = [
    "ACDC",
    "DPF",
    "L0",
    "PLATON",
    "SFW",
    "SRSTE",
    "STR",
    "Baseline",
    "CompressionAwareSFW",
    "GradualMagnitude",
    "GradualObs",
    "HeldMask",
    "LotteryTickets",
    "Movement",
    "Scheduled",
    "SoftMovement",
    "SparsitySchedule",
    "Steps",
    "register_method",
]
