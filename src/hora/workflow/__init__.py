"""Training library of the labs: a fit loop and its parts, for one process or many."""

from hora.workflow.checkpoint import Checkpoints, seed_everything
from hora.workflow.fit import fit
from hora.workflow.history import History
from hora.workflow.model_file import Feature, ModelFile, load, save
from hora.workflow.plots import plot_history, plot_weights
from hora.workflow.progress import Logger, MLflowLog, TensorBoardLog
from hora.workflow.sampler import Loaders, ShardSampler, TensorLoader, make_loaders
from hora.workflow.schedule import EarlyStopping, Schedule
from hora.workflow.step import Metric, Recipe, accuracy, evaluate

__all__ = [
    "Checkpoints",
    "EarlyStopping",
    "Feature",
    "History",
    "Loaders",
    "Logger",
    "MLflowLog",
    "Metric",
    "ModelFile",
    "Recipe",
    "Schedule",
    "ShardSampler",
    "TensorBoardLog",
    "TensorLoader",
    "accuracy",
    "evaluate",
    "fit",
    "load",
    "make_loaders",
    "plot_history",
    "plot_weights",
    "save",
    "seed_everything",
]
