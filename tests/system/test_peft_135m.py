"""A real model: the 135M job trained here and by a plain PEFT loop, in float32."""

import importlib.util
import json
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, get_scheduler

import examples.demo as demo
from tlora.local import RunOptions, prepare, train
from tlora.spec import parse_job
from tlora.tracking import read_metrics

STEPS, BATCH = 3, 4
