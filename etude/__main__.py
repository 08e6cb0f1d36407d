# SPDX-License-Identifier: Apache-2.0
"""``python -m etude ...`` is ``etude ...``."""

from etude.cli.main import main

raise SystemExit(main())
