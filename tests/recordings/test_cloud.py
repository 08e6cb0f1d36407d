# SPDX-License-Identifier: Apache-2.0
"""Recordings behind URLs: on a real S3 server, and in fsspec's memory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import gymnasium as gym
import numpy as np
import pyarrow.compute as pc
import pytest
from pyarrow import fs
from some_recording import ACTION, OBS, assert_same, numbered, record
from test_kill import CHILD

from etude.cli import main
from etude.errors import DataError
from etude.recordings import Recording, RecordingWriter, convert, validate


@pytest.fixture(params=["s3", "memory"])
def where(request):
    """A place for a folder."""
    if request.param == "s3":
        return request.getfixturevalue("s3").url
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return "memory://bucket"


def all_of(length=40, count=6):
    return numbered([length + i for i in range(count)])


def test_what_is_written_is_read(where, tmp_path):
    exp = all_of()
    record(f"{where}/runs/a", exp, max_rows_per_file=100)
    record(tmp_path / "a", exp, max_rows_per_file=100)
    here, there = Recording.open(tmp_path / "a"), Recording.open(f"{where}/runs/a/")
    assert str(there.path) == f"{where}/runs/a"
    assert [str(path) for path in there.files] == [f"{where}/runs/a/part-{i:05d}.parquet" for i in range(3)]
    assert_same(there.read(), exp)
    assert_same(
        there.read(columns=["reward"], filter=pc.field("t") > 3),
        here.read(columns=["reward"], filter=pc.field("t") > 3),
    )
    a, b = (r.batches(32, seed=3, epochs=1) for r in (here, there))
    for one, other in zip(a, b, strict=True):
        assert {name: column.tolist() for name, column in one.items()} == {n: c.tolist() for n, c in other.items()}
    assert {**there.info(), "path": 0} == {**here.info(), "path": 0}
    assert there.validate().ok
    assert there.validate().path == f"{where}/runs/a"
    assert_same(Recording.open(there.files[0]).read(), Recording.open(here.files[0]).read())


def test_more_is_appended_and_a_recording_is_not_written_over(where):
    record(f"{where}/a", numbered([3, 4]))
    with pytest.raises(DataError, match=rf"{where}/a: holds a recording of 1 file already"):
        record(f"{where}/a", numbered([3]))
    record(f"{where}/a", numbered([5], first=2), append=True)
    assert_same(Recording.open(f"{where}/a").read(), numbered([3, 4, 5]))


def test_from_one_place_to_another(where, tmp_path):
    record(tmp_path / "a", all_of())
    convert(Recording.open(tmp_path / "a"), f"{where}/b")
    back = convert(Recording.open(f"{where}/b"), tmp_path / "c")
    assert_same(back.read(), all_of())


def test_lists_and_globs_are_one_recording(where, tmp_path):
    exp = all_of()
    record(f"{where}/runs/1", exp[:2], max_rows_per_file=41)
    record(f"{where}/runs/2", exp[2:4])
    record(tmp_path / "c", exp[4:])
    files = Recording.open(
        [f"{where}/runs/1/*.parquet", f"{where}/runs/2/part-00000.parquet", str(tmp_path / "c" / "*.parquet")]
    )
    assert_same(files.read(), exp)  # files of one kind: ids as they are
    assert len(files.files) == 4
    folders = Recording.open([f"{where}/runs/*", tmp_path / "c"])
    assert folders.format == "etude-recording"
    ids = [f"{i // 2}-e{i}" for i in range(6)]
    assert_same(
        folders.read(),
        type(exp)(exp.steps, exp.offsets, exp.segments.replace(episode_id=np.array(ids, object)), exp.final_obs),
    )
    assert folders.num_episodes == 6
    assert folders.validate().ok
    assert folders.validate().rows == exp.num_steps
    assert str(folders.path) == f"{where}/runs/*, {tmp_path / 'c'}"
    late = folders.read(filter=pc.field("t") >= 40)
    assert late.num_steps == sum(range(6))
    assert sum(len(batch["reward"]) for batch in folders.batches(50, epochs=1)) == exp.num_steps


def test_the_command_line_takes_urls(where, capsys):
    record(f"{where}/a", all_of())
    assert main.main(["data", "info", f"{where}/a", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["episodes"]) == (f"{where}/a", 6)
    assert main.main(["data", "validate", f"{where}/a/*.parquet"]) == 0
    assert "no problems" in capsys.readouterr().out


def test_a_file_system_that_is_passed_in(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    bucket = s3.url.removeprefix("s3://")
    record(f"{bucket}/a", all_of(), filesystem=s3.system)
    for text in (f"{bucket}/a", f"{s3.url}/a", f"{s3.url}/[a]", [f"{s3.url}/a/part-00000.parquet"]):
        assert_same(Recording.open(text, filesystem=s3.system).read(), all_of())
    assert validate(f"{s3.url}/a", filesystem=s3.system).ok
    assert Recording.open(f"{s3.url}/a", filesystem=s3.system).validate().ok
    sub = fs.SubTreeFileSystem(bucket, s3.system)
    assert_same(Recording.open("a", filesystem=sub).read(), all_of())


def test_nothing_is_asked_twice(s3):
    record(f"{s3.url}/a", all_of(count=20), max_rows_per_file=50)
    s3.requests.clear()
    recording = Recording.open(f"{s3.url}/a")
    files = len(recording.files)
    assert files > 16
    assert sum("list-type=2" in line and "max-keys=1000" in line for line in s3.requests) == 1
    footers = [line for line in s3.requests if line.startswith("GET") and ".parquet" in line]
    assert len(footers) == len(set(footers)) == files
    s3.requests.clear()
    Recording.open(f"{s3.url}/a/*.parquet")
    footers = [line for line in s3.requests if line.startswith("GET") and ".parquet" in line]
    assert len(footers) == len(set(footers)) == files


# -- credentials ---------------------------------------------------------------------------------------------------


def test_credentials_are_used_but_never_told(s3, monkeypatch, tmp_path, capsys):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    bucket = s3.url.removeprefix("s3://")

    def url(path):
        return f"s3://TOPKEY:TOP%2FSECRET@{bucket}/{path}?endpoint_override={s3.address}&scheme=http&region=us-east-1"

    record(url("a"), all_of(), meta={"note": "x"})
    recording = Recording.open(url("a"))
    assert_same(recording.read(), all_of())
    copy = convert(recording, tmp_path / "b")
    several = Recording.open([url("a"), tmp_path / "b"])
    told = [str(recording), repr(recording), repr(recording.path), str(recording.files), recording.info(), copy.info()]
    told += [repr(several.path), str(several.path), several.info(), several.validate(), recording.validate().to_json()]
    with RecordingWriter(url("c"), obs_space=OBS, action_space=ACTION) as writer:
        told += [str(writer.path), repr(writer.path)]
    for path in ("nothing", "c", "x*"):
        with pytest.raises(DataError) as caught:
            Recording.open(url(path))
        told.append(caught.value)
    assert main.main(["data", "info", url("a")]) == 0
    told += [capsys.readouterr(), (tmp_path / "b" / "part-00000.parquet").read_bytes()]
    told.append(s3.system.open_input_file(f"{bucket}/a/part-00000.parquet").read())
    for text in map(str, told):
        assert not [word for word in ("TOPKEY", "SECRET", "endpoint_override") if word in text], text


# -- what can't be done --------------------------------------------------------------------------------------------


def test_what_is_not_there(where):
    for path in ("a", "none/at/all.parquet"):
        with pytest.raises(DataError, match=rf"{where}/{path}: there is no such file or folder"):
            Recording.open(f"{where}/{path}")
    with pytest.raises(DataError, match=rf"{where}/x\*: no file or folder matches this glob"):
        Recording.open(f"{where}/x*")
    with pytest.raises(DataError, match=rf"{where}/a: there is no such file or folder"):
        Recording.open([f"{where}/a", f"{where}/b"])
    with pytest.raises(DataError, match="an empty list was given"):
        Recording.open([])
    with pytest.raises(DataError, match=r"can't open a int as a recording: give a path, a URL"):
        Recording.open(3)


def test_no_such_bucket_and_no_such_server(s3, monkeypatch):
    with pytest.raises(DataError, match=r"s3://no-bucket/a: there is no such file or folder"):
        Recording.open("s3://no-bucket/a")
    with pytest.raises(
        DataError, match=r"s3://no-bucket/a: can't write a recording here: .*Bucket 'no-bucket' not found"
    ):
        record("s3://no-bucket/a", all_of())
    with pytest.raises(DataError, match=r"can't open nosuch://a/b: pyarrow says: .*; fsspec says: .*Install"):
        Recording.open("nosuch://a/b")
    closed = fs.S3FileSystem(
        access_key="k", secret_key="s", endpoint_override="127.0.0.1:9", scheme="http", region="us-east-1",
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"s3://bucket/a: can't be accessed \(.*\)\. Is the name right, and do the cred"
    ):
        Recording.open("s3://bucket/a", filesystem=closed)


def test_broken_files_are_named(where):
    record(f"{where}/a", all_of(), max_rows_per_file=100)
    path = Recording.open(f"{where}/a").files[1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"{where}/a/part-00001\.parquet: is not a whole Parquet file"):
        Recording.open(f"{where}/a")
    (problem,) = (p for p in validate(f"{where}/a").problems if p.kind == "truncated_file")
    assert problem.file == f"{where}/a/part-00001.parquet"
    path.unlink()
    with pytest.raises(DataError, match=rf"{where}/a/part-00001\.parquet: is not there, but when part-00002"):
        Recording.open(f"{where}/a")


def test_a_write_that_fails_leaves_nothing_visible(s3, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket = s3.url.removeprefix("s3://")
    writer = RecordingWriter(f"{s3.url}/a", obs_space=OBS, action_space=ACTION)
    writer.write(all_of())
    assert list(tmp_path.iterdir()) == []
    s3.system.delete_dir(bucket)
    with pytest.raises(DataError, match=rf"{s3.url}/a: writing failed after 0 rows were on the disk: .*NO_SUCH_BUCKET"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
    s3.system.create_dir(bucket)
    assert s3.system.get_file_info(fs.FileSelector(bucket, recursive=True)) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_writer_that_is_killed_leaves_whole_files(s3, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"{s3.url}/a", str(Path(__file__).parent), "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert child.stdout is not None
    reported = 0
    while not any("/a/part-00003.parquet?uploads" in line for line in s3.requests):  # it is being sent
        words = child.stdout.readline().split()
        assert words
        reported = max(reported, int(words[-1])) if words != ["ready"] else 0
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    recording = Recording.open(f"{s3.url}/a")
    assert recording.num_steps >= reported
    assert recording.validate().ok
    lengths = recording.read().lengths
    assert (lengths == np.resize([20, 35, 1], len(lengths))).all()  # whole episodes only
    record(f"{s3.url}/a", numbered([5], first=10**6), append=True)
    assert Recording.open(f"{s3.url}/a").num_steps == recording.num_steps + 5


def test_recordings_that_do_not_go_together(tmp_path):
    record(tmp_path / "a", all_of())
    record(tmp_path / "b", all_of(), columns=["obs", "action"])
    other = gym.spaces.Box(-1, 1, (3,), np.float32)
    with RecordingWriter(tmp_path / "c", obs_space=other, action_space=ACTION) as writer:
        writer.write(all_of())
    with pytest.raises(
        DataError, match=r"a/part-00000\.parquet and .*b/part-.* can't be read as one .*only .*a/part-.* has `reward`"
    ):
        Recording.open([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(
        DataError, match=r"a/part-0.* and .*c/part-0.* can't be read as one recording: the `obs` space is Box"
    ):
        Recording.open([tmp_path / "a", tmp_path / "c"])


def test_columns_of_other_dtypes_are_refused(tmp_path):
    exp = all_of()
    record(tmp_path / "a", exp)
    record(
        tmp_path / "b",
        type(exp)(
            {**exp.steps, "reward": exp.steps["reward"].astype(np.float32)}, exp.offsets, exp.segments, exp.final_obs
        ),
    )
    joined = Recording.open([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(
        DataError, match=r"b/part-00000\.parquet: column `reward` is float32.*, but float64.* in another of"
    ):
        joined.read()
    assert joined.read(columns=["obs", "action"]).num_steps == 2 * exp.num_steps
