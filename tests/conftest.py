"""Triton kernels run in Triton's interpreter where no GPU is asked for; it must be told before they are defined."""

import os

if os.environ.get("TLORA_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
