# SPDX-License-Identifier: Apache-2.0
"""The ray engine: runners, learners and the offline pipeline on a Ray cluster, and Tune."""
