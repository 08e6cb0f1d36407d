# SPDX-License-Identifier: Apache-2.0
"""The table of mutations fits the package: `make mutations` breaks what it says, and runs tests that exist."""

import pytest
from mutations import HERE, MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_is_there_once_and_so_are_the_tests(mutation: Mutation) -> None:
    assert (HERE / "etude" / mutation.file).read_text().count(mutation.old) == 1
    assert [name for name in mutation.tests.split() if not (HERE / "tests" / name).exists()] == []
