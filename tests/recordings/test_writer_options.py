# SPDX-License-Identifier: Apache-2.0
"""Codecs by column, file series of several writers, and a meta that changes."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from some_recording import ACTION, OBS, assert_same, numbered, record

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.recordings import Recording, RecordingWriter
from etude.recordings.layout import Codec, codec_of, codecs


def compressions(path):
    group = pq.read_metadata(next(path.glob("*.parquet"))).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    return {column.path_in_schema.removesuffix(".list.element"): column.compression for column in columns}


@pytest.mark.parametrize("name", ["none", "snappy", "lz4", "lz4:9", "gzip", "gzip:9", "brotli:4", "zstd", "zstd:22"])
def test_each_codec_keeps_all_bits(tmp_path, name):
    exp = numbered([30, 4])
    record(tmp_path / "r", exp, compression=name)
    assert_same(Recording.open(tmp_path / "r").read(), exp)
    assert set(compressions(tmp_path / "r").values()) == {
        {"none": "UNCOMPRESSED"}.get(name, name.split(":")[0].upper())
    }


def test_levels_matter(tmp_path):
    exp = numbered([3000])
    sizes = []
    for level in (1, 19):
        record(tmp_path / str(level), exp, compression=f"obs=zstd:{level}")
        sizes.append(next((tmp_path / str(level)).glob("*.parquet")).stat().st_size)
    assert sizes[1] < sizes[0]


def test_the_longest_root_counts(tmp_path):
    exp = numbered([6])
    found = codecs({"obs/camera": "zstd:3", "obs": "lz4", "": "gzip"})
    assert codec_of("obs/camera", found) == codec_of("final_obs/camera", found) == Codec("zstd", 3)
    assert codec_of("obs/camera/left", found) == Codec("zstd", 3)
    assert codec_of("obs/arm", found) == codec_of("final_obs", found) == Codec("lz4")
    assert codec_of("observer", found) == Codec("gzip")
    assert codec_of("reward", codecs(None)) is None
    assert codecs("obs/camera=zstd:3, obs=lz4,gzip") == found
    record(tmp_path / "r", exp.with_steps(more=np.zeros(6)), compression={"obs": "snappy", "reward": "gzip:1"})
    found = compressions(tmp_path / "r")
    assert (found["obs"], found["final_obs"], found["reward"], found["more"]) == ("SNAPPY", "SNAPPY", "GZIP", "LZ4")


def test_codecs_for_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match="`compression` names `reward/x`, but there is no such column: obs, action, re"):
        record(tmp_path / "r", numbered([3]), compression={"reward/x": "lz4"})
    with pytest.raises(SettingsError, match=r"`compression` of `obs` is 'zstd:'; known are .*zstd 1 to 22"):
        record(tmp_path / "s", numbered([3]), compression={"obs": "zstd:"})
    assert not (tmp_path / "s").exists()


def test_writers_with_prefixes_of_their_own_write_one_recording_at_one_time(tmp_path):
    parts = [numbered([20, 30, 25], first=first) for first in (0, 3, 6)]
    spaces = {"obs_space": OBS, "action_space": ACTION, "append": True, "max_rows_per_file": 30}
    writers = [RecordingWriter(tmp_path, **spaces, prefix=f"runner{i}") for i in range(3)]
    for one in range(3):
        for writer, part in zip(writers, parts, strict=True):
            writer.write(part[one])
            writer.flush()
    for writer in writers:
        writer.close()
    names = sorted(path.name for path in tmp_path.glob("*.parquet"))
    assert names == [f"runner{i}-0000{k}.parquet" for i in range(3) for k in range(3)]
    assert_same(Recording.open(tmp_path).read(), Experience.concat(parts))
    with RecordingWriter(tmp_path, **spaces, prefix="runner1") as writer:
        assert writer.next_file == 3


@pytest.mark.parametrize("compression", [None, "obs=zstd:3"])
def test_the_plain_encoding_is_one_that_older_tools_read(tmp_path, compression):
    exp = numbered([300, 4])
    record(tmp_path / "r", exp, encoding="plain", compression=compression)
    assert_same(Recording.open(tmp_path / "r").read(), exp)
    group = pq.read_metadata(next((tmp_path / "r").glob("*.parquet"))).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    assert {name for column in columns for name in column.encodings} <= {"PLAIN", "RLE", "RLE_DICTIONARY"}
    others = {column.compression for column in columns if not column.path_in_schema.startswith(("obs", "final_obs"))}
    assert others == {"SNAPPY"}
    assert compressions(tmp_path / "r")["obs"] == ("ZSTD" if compression else "SNAPPY")


def test_an_unknown_encoding(tmp_path):
    with pytest.raises(SettingsError, match="`encoding` is 'plane'. Nearest: `plain`"):
        record(tmp_path / "r", encoding="plane")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("prefix", ["", ".a", "_a", "a/b"])
def test_prefixes_that_can_not_be(tmp_path, prefix):
    with pytest.raises(ValueError, match="prefix is"):
        RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION, prefix=prefix)


def test_meta_may_change_while_writing(tmp_path):
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION, meta={"known": 1}) as writer:
        writer.write(numbered([3]))
        writer.flush()
        writer.set_meta({"known": 2})
        with pytest.raises(DataError, match="`meta` must be plain JSON data"):
            writer.set_meta({"known": object()})
        assert Recording.open(tmp_path).meta == {"known": 1}
        writer.write(numbered([3], first=1))
    assert Recording.open(tmp_path).meta == {"known": 2}
    each = [Recording.open(file).meta for file in sorted(tmp_path.glob("*.parquet"))]
    assert each == [{"known": 1}, {"known": 2}]
