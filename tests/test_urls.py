# SPDX-License-Identifier: Apache-2.0
"""URLs, and that no credentials in them are shown."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude import files, urls
from etude.errors import DataError


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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (" s3://KEY:SECRET@bucket/run", " s3://***@bucket/run"),
        ("\ns3://KEY:SECRET@bucket/run", "\ns3://***@bucket/run"),
        ("s3:/KEY:SECRET@bucket/run", "s3://***@bucket/run"),  # as pathlib writes it
        ("s3:///KEY:SECRET@bucket/run", "s3://***@bucket/run"),
        ("jdbc:db://host/run?SECRET", "jdbc:db://host/run"),
        ("https://tok;SECRET@host/run", "https://***@host/run"),
        ("https://host/run?*SECRET", "https://host/run"),
        ("https://host/run?/SECRET", "https://host/run"),
        ("s3://bucket/run?.SECRET@x", "s3://bucket/run"),
        ("file:///home/me@work/run", "file:///home/me@work/run"),
        ("C:/me@work/run", "C:/me@work/run"),
    ],
)
def test_what_is_mistyped_or_rare_shows_no_secret_either(url, shown):
    assert urls.redacted(url) == shown


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


MARKS = st.lists(st.sampled_from("@:/%?#;&=+.-_~[]!*, '\"").map(lambda c: f"{c}SECRET"), max_size=4).map("".join)
"""Secrets: letters that mean something in a URL, each before a mark that must not be seen."""


@given(
    st.sampled_from(("s3", "gs", "http", "https", "ftp", "sftp", "hdfs", "memory", "simplecache::s3", "a::b::https")),
    st.one_of(st.none(), st.tuples(st.sampled_from(("", "u", "USER")), MARKS)),
    st.sampled_from(("bucket", "host.example:8080", "[::1]:80", "10.0.0.1")),
    st.sampled_from(("", "/", "/runs/a b/c", "/part-?.parquet", "/x=1/y*", "/a%20b")),
    MARKS,
    MARKS,
    MARKS,
    st.booleans(),
)
def test_no_part_of_user_info_params_query_or_fragment_is_shown_or_stored(
    scheme, user, host, path, params, query, fragment, is_named
):
    url = f"{scheme}://"
    if user is not None:
        url += f"{user[0]}:SECRET{user[1]}@"
    url += host + path
    url += f";SECRET{params}" if params else ""
    url += f"?{'token=' * is_named}SECRET{query}" if query else ""
    url += f"#access_token=SECRET{fragment}" if fragment else ""
    if not user and not params and not query and not fragment and not ("?" in path and "http" in scheme):
        assert urls.redacted(url) == urls.without_credentials(url) == url
        assert urls.can_be_kept(url)
    shown = urls.redacted(url)
    assert "SECRET" not in shown
    assert shown.startswith(f"{scheme}://")
    assert urls.redacted(shown) == shown
    assert "SECRET" not in urls.without_credentials(url)
    assert "SECRET" not in urls.without_secrets(f"can't parse {url} as it is ({url!r})", url)
    with pytest.raises(DataError) as caught:
        files.system_of("nosuch" + url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:p@ss@host/x", "ftp://***@host/x"),
        ("ftp://me:p:a:ss@host:21/x", "ftp://***@host:21/x"),
        ("ftp://me:p%40ss@host/x", "ftp://***@host/x"),
        ("ftp://me:1/2@host/x", "ftp://***@host/x"),
        ("ftp://me:p@s/s@host/x", "ftp://***@host/x"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("https://ghp_token@host:8080/x@y", "https://***@host:8080/x@y"),
        ("https://host/x#access_token=T", "https://host/x"),
        ("https://host/x;jsessionid=T?a=b", "https://host/x"),
        ("https://host/x?TOKEN", "https://host/x"),
        ("https://host/x?=TOKEN", "https://host/x"),
        ("https://host/x?a&b", "https://host/x"),
        ("filecache::https://me:TOKEN@host/x", "filecache::https://***@host/x"),
        ("zip://a/b::s3://KEY:SECRET@bucket/c.zip", "zip://a/b::s3://***@bucket/c.zip"),
        ("s3://bucket/a?[0-9]/b?", "s3://bucket/a?[0-9]/b?"),
        ("hf://datasets/me/cart@v2/x", "hf://datasets/me/cart@v2/x"),
    ],
)
def test_secrets_of_every_kind_are_not_shown(url, shown):
    assert urls.redacted(url) == shown
    assert urls.without_credentials(url) == shown.replace("***@", "")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://KEY:SECRET@bucket/x?region=a&secret_key=b", True),
        ("s3://bucket/part-?.parquet", True),
        ("runs/a#1;2?b", True),  # a path
        ("s3://bucket/run#1", False),
        ("s3://bucket/run;1", False),
        ("s3://bucket/part-?a", False),
        ("https://host/x?a=b#c", False),
        ("ftp://me:pass@host/a@b", False),
    ],
)
def test_what_may_mean_another_place_without_what_is_hidden_is_not_kept(url, expected):
    assert urls.can_be_kept(url) is expected


@pytest.mark.parametrize(
    "url",
    ["reference::file:///x.json", "reference://a::memory://x.json", "simplecache::reference://a::s3://K:SECRET@b/x"],
)
def test_an_index_whose_templates_fsspec_evaluates_is_not_opened(url):
    with pytest.raises(DataError, match="`reference` URLs are not opened") as caught:
        files.located(url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_broken_archive_in_a_chain_is_an_error_in_words(kind, tmp_path):
    (tmp_path / "x").write_text("no archive")
    with pytest.raises(DataError, match=f"can't open {kind}://a::file://.*fsspec says: "):
        files.located(f"{kind}://a::file://{tmp_path / 'x'}")


def test_a_long_message_is_not_cut_within_a_secret():
    url = f"nope://KEY:{'S3CR3T' * 60}@bucket/x"  # pyarrow's message is of all of it
    with pytest.raises(DataError, match="Unrecognized") as caught:
        files.system_of(url)
    assert "S3CR" not in str(caught.value)


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
    with pytest.raises(DataError, match=r"can't open s3://\*\*\*@bucket/x: pyarrow says: .*; fsspec says: ") as caught:
        files.system_of("s3://KEYKEY:SECRET:SECRET@bucket/x?nonsense=HIDDEN")
    assert not [word for word in ("KEYKEY", "SECRET", "HIDDEN") if word in str(caught.value)]
    assert caught.value.__cause__ is None


def test_a_folder_s_member_stands_before_the_query():
    assert urls.inside("s3://bucket/run/?region=x&scheme=http", "a") == "s3://bucket/run/a?region=x&scheme=http"
    assert urls.inside("s3://bucket/run", "a") == "s3://bucket/run/a"
    assert urls.inside("runs/x/", "a") == urls.inside(Path("runs/x"), "a") == os.path.join("runs", "x", "a")


def test_file_systems_are_made_once_for_one_root():
    known = {}
    first, path = files.system_of("s3://bucket/a%20b/c?region=us-east-1", known)
    second, other = files.system_of("s3://bucket/d e/[1]?region=us-east-1", known)
    assert first is second
    assert (path, other) == ("bucket/a b/c", "bucket/d e/[1]")
    files.system_of("s3://bucket/x?region=eu-west-1", known)
    assert len(known) == 2
