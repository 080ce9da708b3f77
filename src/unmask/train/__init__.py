"""Training of masked diffusion models: `load_config`, then `train`."""

from unmask.train.config import TrainConfig, load_config
from unmask.train.trainer import train

__all__ = ["TrainConfig", "load_config", "train"]
