"""A run of training: model, text, options, checkpoints, progress.

Every train.py calls the names below, and measure trains the same model on the same text."""

from harness.run.meeting import disconnect as disconnect
from harness.train.checkpoints import Checkpoints as Checkpoints
from harness.train.corpus import load_data as load_data
from harness.train.gpt import build_model as build_model
from harness.train.options import connect as connect
from harness.train.options import parse_args as parse_args
from harness.train.progress import Report as Report
from harness.train.progress import evaluate as evaluate
from harness.train.schedule import warmup_then_cosine as warmup_then_cosine
