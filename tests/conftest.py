# SPDX-License-Identifier: Apache-2.0
"""One thread for everything: tests run beside other work, and two thread pools make each other crawl."""

import hypothesis
import threadpoolctl
import torch

torch.set_num_threads(1)
threadpoolctl.threadpool_limits(1)
hypothesis.settings.register_profile("etude", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("etude")
