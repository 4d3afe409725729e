"""What every train.py calls: options, data, model, checkpoints, progress."""

from harness.checkpoints import Checkpoints as Checkpoints
from harness.corpus import load_data as load_data
from harness.gpt import build_model as build_model
from harness.meeting import disconnect as disconnect
from harness.options import connect as connect
from harness.options import parse_args as parse_args
from harness.options import warmup_then_cosine as warmup_then_cosine
from harness.progress import Report as Report
from harness.progress import evaluate as evaluate
