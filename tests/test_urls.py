# SPDX-License-Identifier: Apache-2.0
"""URLs, and that no credentials in them are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude import urls
from etude.errors import CheckpointError, DataError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://KEY:SECRET@bucket/run", "s3://***@bucket/run"),
        ("s3://KEY:SE/CR+ET@bucket/run", "s3://***@bucket/run"),
        ("s3://KEY@bucket/run/x@y", "s3://***@bucket/run/x@y"),
        ("s3://KEY:SECRET@bucket?region=us-east-1", "s3://***@bucket"),
        ("s3://bucket/run?access_key=K&secret_key=a/b", "s3://bucket/run"),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        ("s3://bucket/at=12:30/x@y", "s3://bucket/at=12:30/x@y"),
        ("http://host:8080/x@y", "http://host:8080/x@y"),
        ("abfs://box@account.dfs.core.windows.net/x", "abfs://box@account.dfs.core.windows.net/x"),
        ("abfs://box:PASS@account.dfs.core.windows.net/x", "abfs://***@account.dfs.core.windows.net/x"),
        ("runs/a:b@c?d=e", "runs/a:b@c?d=e"),  # a path
    ],
)
def test_what_is_shown(url, shown):
    assert urls.redacted(url) == shown
    assert urls.redacted(shown) == shown


@given(
    st.text("abcXYZ0189/+=", min_size=8),
    st.text("abcXYZ0189", min_size=4),
    st.sampled_from(("s3", "sftp", "gs")),
    st.booleans(),
)
def test_a_secret_is_never_shown(secret, key, scheme, in_query):
    mark = f"Q{secret}Q"
    url = (
        f"{scheme}://bucket/run?access_key={key}&secret_key={mark}" if in_query else f"{scheme}://{key}:{mark}@bucket/r"
    )
    assert mark not in urls.redacted(url)
    assert mark not in urls.without_secrets(f"Cannot parse URI {url} because of {mark}", url)
    assert mark not in urls.without_credentials(url)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("s3://KEY:SE/CRET@bucket/run?region=x&secret_key=S&scheme=http", "s3://bucket/run?region=x&scheme=http"),
        ("s3://bucket/part-?.parquet", "s3://bucket/part-?.parquet"),
        ("abfs://box:PASS@account.dfs.core.windows.net/x", "abfs://box@account.dfs.core.windows.net/x"),
        ("abfs://box@account.dfs.core.windows.net/x?sas=S", "abfs://box@account.dfs.core.windows.net/x"),
        ("sftp://me@host/x", "sftp://me@host/x"),
        ("sftp://me:PASS@host/x", "sftp://host/x"),
        ("s3://KEY@bucket/x", "s3://bucket/x"),
        ("runs/a:b@c?d=e", "runs/a:b@c?d=e"),
    ],
)
def test_what_is_kept_can_be_used_with_other_credentials(url, kept):
    assert urls.without_credentials(url) == kept


def test_what_pyarrow_says_of_a_url_is_shown_without_its_secret():
    for kind in (DataError, CheckpointError):
        with pytest.raises(kind, match=r"can't open s3://\*\*\*@bucket/x: pyarrow says: .*; fsspec says: ") as caught:
            urls.system_of("s3://KEYKEY:SECRET:SECRET@bucket/x?nonsense=HIDDEN", kind)
        assert not [word for word in ("KEYKEY", "SECRET", "HIDDEN") if word in str(caught.value)]
        assert caught.value.__cause__ is None


def test_a_folder_s_member_stands_before_the_query():
    assert urls.inside("s3://bucket/run/?region=x&scheme=http", "a") == "s3://bucket/run/a?region=x&scheme=http"
    assert urls.inside("s3://bucket/run", "a") == "s3://bucket/run/a"


def test_file_systems_are_made_once_for_one_root():
    known = {}
    first, path = urls.system_of("s3://bucket/a%20b/c?region=us-east-1", DataError, known)
    second, other = urls.system_of("s3://bucket/d e/[1]?region=us-east-1", DataError, known)
    assert first is second
    assert (path, other) == ("bucket/a b/c", "bucket/d e/[1]")
    urls.system_of("s3://bucket/x?region=eu-west-1", DataError, known)
    assert len(known) == 2
